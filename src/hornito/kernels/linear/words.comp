// Linear for one row on software drivers with subgroups: eight lanes load eight neighbouring words of
// a weight row, so that memory is read in order; OUTPUTS weight rows share each load of x, and the
// lanes' sums join at the end. Of quantised rows a lane takes sixteen weights at a time, which have one
// scale: their integers are summed up first.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
//
// Geometry: 8 threads = OUTPUTS output rows (x); one row of x (y).
// Requires: a subgroup of at least 8, subgroup ballot operations; K a multiple of 8 (q: of 16).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 OUTPUTS (1 to 16; with GATED 1 to 8),
// 6 SOFTCAP, 7 FORMAT, 8 GROUP.
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

#ifdef WEIGHT_Q
// Sixteen values of x, times what load_quants16 asks for, and the sum of the values.
struct Part {
  vec4 x[4];
  float total;
};

const uint LANE_WEIGHTS = 16u;

Part load_part(uint at) {
  Part part;
  [[unroll]] for (uint c = 0u; c < 4u; ++c) part.x[c] = load_float4(p.x, at / 4u + c);
  vec4 s = (part.x[0] + part.x[1]) + (part.x[2] + part.x[3]);
  part.total = (s.x + s.y) + (s.z + s.w);
  [[unroll]] for (uint c = 0u; c < 4u; ++c) part.x[c] *= place_scale(c);
  return part;
}

void add_part(inout vec2 sum, Matrix m, uint row, uint i, Part part) {
  vec4 q[4];
  load_quants16(m, row, i, q);
  vec4 s = fma(q[3], part.x[3], fma(q[2], part.x[2], fma(q[1], part.x[1], q[0] * part.x[0])));
  float dot = (s.x + s.y) + (s.z + s.w);
  if (FORMAT == BF16) {
    sum.x += dot;
    return;
  }
  vec2 scale = load_scale(m, row, 2u * i);
  sum.x = fma(scale.x, dot, sum.x);
  sum.y = fma(FORMAT == INT8 ? -128.0 * scale.x : scale.y, part.total, sum.y);
}
#else
#define Part vec2
const uint LANE_WEIGHTS = WORD_WEIGHTS;

Part load_part(uint at) {
  return vec2(load_float(p.x, at), WORD_WEIGHTS == 2u ? load_float(p.x, at + 1u) : 0.0);
}

void add_part(inout vec2 sum, Matrix m, uint row, uint i, Part x) {
  vec2 w = load_weight_word(m, row, i);
  sum.x = fma(w.x, x.x, sum.x);
  if (WORD_WEIGHTS == 2u) sum.y = fma(w.y, x.y, sum.y);
}
#endif

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
  for (uint i = lane; i < p.k / LANE_WEIGHTS; i += 8u) {
    Part x = load_part(r * p.k + i * LANE_WEIGHTS);
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
