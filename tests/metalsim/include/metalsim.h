// Stands in for <metal_stdlib> and its parts. It includes no system header, so it compiles in a fraction of a second.
#pragma once
#include "array.h"
#include "internals.h"
#include "kernel.h"
#include "matrix.h"
#include "pack.h"

// One address space holds everything here; the checked build knows by the address what is where.
#define thread
#define device
#define threadgroup
#define constant const
#define kernel
#define coherent(scope)
