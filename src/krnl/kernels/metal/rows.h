// Rows read and written four elements at a time, for kernels whose threads own four adjacent elements each.
#pragma once
#include "common.h"

// Every row begins at, and has, a multiple of four elements: the host looks at widths and offsets.
constant bool vectorised [[function_constant(0)]];

// Elements j to j + 3 of a row, zeros beyond its width.
template <typename T>
METAL_FUNC vec<T, 4> read4(device const T *row, uint j, uint width) {
  vec<T, 4> values = vec<T, 4>(T(0));
  if (vectorised) {
    if (j < width) values = *(device const vec<T, 4> *)(row + j);
  } else {
    for (uint i = 0; i < 4; i++)
      if (j + i < width) values[i] = row[j + i];
  }
  return values;
}

// Writes what of them lies within the width.
template <typename T>
METAL_FUNC void write4(device T *row, uint j, uint width, vec<T, 4> values) {
  if (vectorised) {
    if (j < width) *(device vec<T, 4> *)(row + j) = values;
  } else {
    for (uint i = 0; i < 4; i++)
      if (j + i < width) row[j + i] = values[i];
  }
}

// The same, converted from and to the element type.
template <typename T>
METAL_FUNC float4 load4(device const T *row, uint j, uint width) {
  return to_float(read4(row, j, width));
}

template <typename T>
METAL_FUNC void store4(device T *row, uint j, uint width, float4 values) {
  write4(row, j, width, vec<T, 4>(values));
}
