// RMS norm: out[s, i] = x[i] * rsqrt(mean(x^2) + eps) * weight[i] (+ residual[s, i]), with
// x the row s of the input or, when SELECT is 1, the row that the selection names. A row may be cut
// into heads, each normed on its own by the same weight.
//
// Geometry: 128 threads a head; x = rows, y = heads of a row (1: H is the whole row). The sum is a
// fixed tree.
// Push: addresses of x [T, heads, H], weight [H], selection [S] (or anything), residual [S, heads, H]
// (or anything), out [S, heads, H], the call header {live rows, live selected rows}; which of its
// words counts out's rows; H, eps.
// Specialisation: 0 SELECT, 1 RESIDUAL.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "rows.glsl"
#include "squares.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint SELECT = 0u;
layout(constant_id = 1) const uint RESIDUAL = 0u;

layout(push_constant) uniform Push {
  Floats x;
  Floats weight;
  Words selection;
  Floats residual;
  Floats result;
  Words call;
  uint live_word;
  uint width;
  float eps;
} p;

shared float partial[128];

void main() {
  uint s = gl_WorkGroupID.x;
  uint t = gl_LocalInvocationID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = SELECT == 1u ? load_word(p.selection, s) : s;
  uint heads = gl_NumWorkGroups.y;
  uint base = (r * heads + gl_WorkGroupID.y) * p.width;
  uint out_base = (s * heads + gl_WorkGroupID.y) * p.width;
  bool wide = p.width % 4u == 0u;
  partial[t] = squares(p.x, base, p.width, t);
  [[dont_unroll]] for (uint half_width = 64u; half_width > 0u; half_width >>= 1) {
    barrier();
    if (t < half_width) partial[t] += partial[t + half_width];
  }
  barrier();
  float scale = inversesqrt(partial[0] / float(p.width) + p.eps);
  if (wide) {
    for (uint i = t; i < p.width / 4u; i += 128u) {
      vec4 v = load_value4(p.x, base / 4u + i) * scale * load_float4(p.weight, i);
      if (RESIDUAL == 1u) v += load_value4(p.residual, out_base / 4u + i);
      store_value4(p.result, out_base / 4u + i, v);
    }
    return;
  }
  for (uint i = t; i < p.width; i += 128u) {
    float v = load_value(p.x, base + i) * scale * load_float(p.weight, i);
    if (RESIDUAL == 1u) v += load_value(p.residual, out_base + i);
    store_value(p.result, out_base + i, v);
  }
}
