// The ends of kernels that hold four sums side by side: linear.glsl's `finish` for all of them, with
// 16-byte stores where rows allow.
#ifndef HORNITO_LINEAR4
#define HORNITO_LINEAR4

#include "linear.glsl"

#ifdef GATED
// Weight rows `weight` to `weight + 3`, two outputs; `weight` is even.
void finish4(uint r, uint weight, vec4 v) {
  uint n = weight / 2u;
  if (BIAS == 1u) {
    for (uint i = 0u; i < 4u; ++i) {
      if (weight + i < 2u * p.n) v[i] += load_float(p.bias, weight + i);
    }
  }
  float first = activate(ACTIVATION, v.x) * v.y;
  float second = activate(ACTIVATION, v.z) * v.w;
  uint at = r * p.n + n;
  if (p.n % 2u == 0u) {
    store_value2(p.result, at, vec2(first, second));
  } else {
    store_value(p.result, at, first);
    if (n + 1u < p.n) store_value(p.result, at + 1u, second);
  }
}
#else
// Outputs n to n + 3; n is a multiple of four.
void finish4(uint r, uint n, vec4 v) {
  if (p.n % 4u != 0u) {
    for (uint i = 0u; i < 4u; ++i) {
      if (n + i < p.n) finish(r, n + i, v[i]);
    }
    return;
  }
  uint at = (r * p.n + n) / 4u;
  if (BIAS == 1u) v += load_float4(p.bias, n / 4u);
  if (ACTIVATION != 15u) {
    for (uint i = 0u; i < 4u; ++i) v[i] = activate(ACTIVATION, v[i]);
  }
  if (RESIDUAL == 1u) v += load_value4(p.residual, at);
  if (SOFTCAP > 0.0) v = SOFTCAP * tanh(clamp(v / SOFTCAP, vec4(-15.0), vec4(15.0)));
  store_value4(p.result, at, v);
}
#endif

#endif
