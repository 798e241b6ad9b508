// What becomes of the elements of a product's sum: one, or two adjacent ones that are read and written together.
#pragma once
#include "common.h"

template <typename T>
__device__ inline void load(float (&x)[1], const T *from) {
  x[0] = to_float(*from);
}
__device__ inline void load(float (&x)[2], const float *from) {
  const float2 two = *reinterpret_cast<const float2 *>(from);
  x[0] = two.x, x[1] = two.y;
}
template <typename T>
__device__ inline void load(float (&x)[2], const T *from) {
  const float2 two = unpack<T>(*reinterpret_cast<const uint32 *>(from));
  x[0] = two.x, x[1] = two.y;
}

template <typename T>
__device__ inline void store(T *to, const float (&x)[1]) {
  *to = from_float<T>(x[0]);
}
__device__ inline void store(float *to, const float (&x)[2]) { *reinterpret_cast<float2 *>(to) = {x[0], x[1]}; }
template <typename T>
__device__ inline void store(T *to, const float (&x)[2]) {
  *reinterpret_cast<uint32 *>(to) = pack<T>(x[0], x[1]);
}

// y = sum · scale + bias + residual, or y += sum. What is null is left out.
template <typename T, typename O>
struct Epilogue {
  O *y;
  const float *scale, *bias;
  const T *residual, *gate, *up;
  T *dgate, *dup;
  int stride;
  bool accumulates;
};

// With `kSwigluBackward` the sum is the gradient at SwiGLU's result, of which dgate, dup and act (for y) are made.
template <bool kSwigluBackward, typename T, typename O, int kCount>
__device__ inline void finish(const Epilogue<T, O> &epilogue, int row, int column, float (&x)[kCount]) {
  const uint64 at = uint64(row) * epilogue.stride + column;
  if constexpr (kSwigluBackward) {
    float gate[kCount], up[kCount], dgate[kCount], dup[kCount];
    load(gate, epilogue.gate + at);
    load(up, epilogue.up + at);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      float rest;
      const float s = sigmoid(gate[i], rest), silu = gate[i] * s;
      dgate[i] = x[i] * up[i] * (s + silu * rest);
      dup[i] = x[i] * silu;
      x[i] = silu * up[i];
    }
    store(epilogue.dgate + at, dgate);
    store(epilogue.dup + at, dup);
  } else {
    float other[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (epilogue.scale) x[i] *= epilogue.scale[column + i];
      if (epilogue.bias) x[i] += epilogue.bias[column + i];
    }
    if (epilogue.residual) {
      load(other, epilogue.residual + at);
#pragma unroll
      for (int i = 0; i < kCount; i++) x[i] += other[i];
    }
    if (epilogue.accumulates) {
      load(other, epilogue.y + at);
#pragma unroll
      for (int i = 0; i < kCount; i++) x[i] += other[i];
    }
  }
  store(epilogue.y + at, x);
}

// gate, up, and act = silu(gate) ∘ up, of what is not yet rounded.
template <typename T>
struct Swiglu {
  T *gate, *up, *act;
  int stride;
};

template <typename T, int kCount>
__device__ inline void finish(const Swiglu<T> &swiglu, int row, int column, const float (&gate)[kCount],
                              const float (&up)[kCount]) {
  const uint64 at = uint64(row) * swiglu.stride + column;
  float act[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    float rest;
    act[i] = gate[i] * sigmoid(gate[i], rest) * up[i];
  }
  store(swiglu.gate + at, gate);
  store(swiglu.up + at, up);
  store(swiglu.act + at, act);
}
