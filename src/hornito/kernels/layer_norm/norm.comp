// Layer norm: out[s, i] = (x[i] - mean) * rsqrt(variance + eps) * weight[i] + bias[i], with
// x the row s of the input or, when SELECT is 1, the row that the selection names. The variance is
// summed from differences to the mean, which keeps its bits when the mean is large.
//
// Geometry: 128 threads a row, one workgroup a row (x). Sums are fixed trees.
// Push: addresses of x [T, H], weight [H], bias [H], selection [S] (or anything), out [S, H], the
// call header {live rows, live selected rows}; which of its words counts out's rows; H, eps.
// Specialisation: 0 SELECT.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "values.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint SELECT = 0u;

layout(push_constant) uniform Push {
  Floats x;
  Floats weight;
  Floats bias;
  Words selection;
  Floats result;
  Words call;
  uint live_word;
  uint width;
  float eps;
} p;

shared float partial[128];

// The sum of every thread's value; all threads come here together.
float sum_of_all(float value) {
  uint t = gl_LocalInvocationID.x;
  barrier();
  partial[t] = value;
  [[dont_unroll]] for (uint half_width = 64u; half_width > 0u; half_width >>= 1) {
    barrier();
    if (t < half_width) partial[t] += partial[t + half_width];
  }
  barrier();
  return partial[0];
}

void main() {
  uint s = gl_WorkGroupID.x;
  uint t = gl_LocalInvocationID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = SELECT == 1u ? load_word(p.selection, s) : s;
  uint base = r * p.width;
  float sum = 0.0;
  for (uint i = t; i < p.width; i += 128u) sum += load_value(p.x, base + i);
  float mean = sum_of_all(sum) / float(p.width);
  sum = 0.0;
  for (uint i = t; i < p.width; i += 128u) {
    float v = load_value(p.x, base + i) - mean;
    sum += v * v;
  }
  float scale = inversesqrt(sum_of_all(sum) / float(p.width) + p.eps);
  for (uint i = t; i < p.width; i += 128u) {
    float v = (load_value(p.x, base + i) - mean) * scale;
    store_value(p.result, s * p.width + i, v * load_float(p.weight, i) + load_float(p.bias, i));
  }
}
