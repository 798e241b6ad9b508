// What kernels of every kind share: element types, finite numbers, reductions over a threadgroup.
// It has no function constants: indices from 0 are free for whoever includes it.
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kLanes = 32;       // threads of a simdgroup
constant constexpr uint kSimdgroups = 32;  // the most that a threadgroup has

// Elements are `float`, `half` or, for bfloat16, `ushort`: the upper half of a float's bits. Not every GPU has that type
// itself.
METAL_FUNC float to_float(float x) { return x; }
METAL_FUNC float to_float(half x) { return float(x); }
METAL_FUNC float to_float(ushort x) { return as_type<float>(uint(x) << 16); }
METAL_FUNC float4 to_float(float4 x) { return x; }
METAL_FUNC float4 to_float(half4 x) { return float4(x); }
METAL_FUNC float4 to_float(ushort4 x) { return as_type<float4>(uint4(x) << 16u); }

// σ(x) and, in `rest`, 1 - σ(x), each without cancellation or overflow. V is float or float4.
template <typename V>
METAL_FUNC V sigmoid(V x, thread V &rest) {
  const V decay = precise::exp(-fabs(x)), larger = 1.0f / (1.0f + decay), smaller = decay * larger;
  rest = select(larger, smaller, x >= V(0.0f));
  return select(smaller, larger, x >= V(0.0f));
}

// Whether the float with these bits is a number, neither infinite nor NaN. Read the bits from memory as uint: of a value
// that ever was a float, fast math lets the compiler assume the answer.
METAL_FUNC bool is_finite(uint bits) { return (bits & 0x7F800000u) != 0x7F800000u; }

// The sum, or the largest, of all threads' values, in a fixed order and the same on every thread. All threads of a
// one-dimensional threadgroup of whole simdgroups call it together. `scratch` has kSimdgroups elements and may be used
// again at once.
METAL_FUNC float threadgroup_sum(float value, threadgroup float *scratch, uint thread_index, uint threads) {
  const uint lane = thread_index % kLanes;
  value = simd_sum(value);
  if (lane == 0) scratch[thread_index / kLanes] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = simd_sum(lane < threads / kLanes ? scratch[lane] : 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return value;
}

METAL_FUNC float threadgroup_max(float value, threadgroup float *scratch, uint thread_index, uint threads) {
  const uint lane = thread_index % kLanes;
  value = simd_max(value);
  if (lane == 0) scratch[thread_index / kLanes] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = simd_max(lane < threads / kLanes ? scratch[lane] : -FLT_MAX);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return value;
}
