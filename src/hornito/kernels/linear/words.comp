// Linear for one row and plain weights on software drivers with subgroups: eight lanes load eight
// neighbouring words of a weight row, so that memory is read in order; OUTPUTS weight rows share each
// load of x, and the lanes' sums join at the end.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
//
// Geometry: 8 threads = OUTPUTS output rows (x); one row of x (y).
// Requires: a subgroup of at least 8, subgroup ballot operations; K a multiple of 8.
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 OUTPUTS (1 to 16; with GATED 1 to 8),
// 6 SOFTCAP.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "linear.glsl"

layout(local_size_x = 8) in;
layout(constant_id = 3) const uint OUTPUTS = 1u;

// The sum of the eight lanes' parts, in a fixed order.
float join(float part) {
  float a = subgroupBroadcast(part, 0u) + subgroupBroadcast(part, 1u);
  float b = subgroupBroadcast(part, 2u) + subgroupBroadcast(part, 3u);
  float c = subgroupBroadcast(part, 4u) + subgroupBroadcast(part, 5u);
  float d = subgroupBroadcast(part, 6u) + subgroupBroadcast(part, 7u);
  return (a + b) + (c + d);
}

vec2 load_part(uint at) {
  return vec2(load_value(p.x, at), WORD_WEIGHTS == 2u ? load_value(p.x, at + 1u) : 0.0);
}

void add_part(inout vec2 sum, Matrix m, uint row, uint i, vec2 x) {
  vec2 w = load_weight_word(m, row, i);
  sum.x = fma(w.x, x.x, sum.x);
  if (WORD_WEIGHTS == 2u) sum.y = fma(w.y, x.y, sum.y);
}

void main() {
  uint lane = gl_SubgroupInvocationID;
  uint n0 = gl_WorkGroupID.x * OUTPUTS;
  uint r = gl_WorkGroupID.y;
  uint live = live_rows();
  if (r >= live) return;
  Matrix m = matrix();
  vec2 sum[16];
#ifdef GATED
  vec2 up[16];
#endif
  [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
    sum[j] = vec2(0.0);
#ifdef GATED
    up[j] = vec2(0.0);
#endif
  }
  for (uint i = lane; i < p.k / WORD_WEIGHTS; i += 8u) {
    vec2 x = load_part(r * p.k + i * WORD_WEIGHTS);
    [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
      uint own = weight_row(min(n0 + j, p.n - 1u));
      add_part(sum[j], m, own, i, x);
#ifdef GATED
      add_part(up[j], m, own + 1u, i, x);
#endif
    }
  }
  [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
    float total = join(sum[j].x + sum[j].y);
#ifdef GATED
    float total_up = join(up[j].x + up[j].y);
#endif
    if (lane == 0u && n0 + j < p.n) {
#ifdef GATED
      finish(r, n0 + j, total, total_up);
#else
      finish(r, n0 + j, total);
#endif
    }
  }
}
