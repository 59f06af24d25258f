// Linear for software drivers with subgroups, whose every lane loads its words one by one: a lane owns
// OUTPUTS output rows, and eight lanes load eight neighbouring values of x once and hand them round
// by subgroup broadcast, so that a value of x is loaded once for 8 * OUTPUTS output rows.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
//
// Geometry: 8 threads = 8 * OUTPUTS output rows (x); ROWS rows of x a workgroup (y).
// Requires: a subgroup of at least 8, subgroup ballot operations; K a multiple of 8.
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 ROWS (1 to 8), 4 OUTPUTS (1 to 8),
// 6 SOFTCAP, 7 FORMAT, 8 GROUP, 9 OUTLIERS.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "linear.glsl"

layout(local_size_x = 8) in;
layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint OUTPUTS = 1u;

// sum += the eight products of w (in a, b) with the eight lanes' x.
float add8(float sum, vec4 a, vec4 b, float x) {
  sum = fma(a.x, subgroupBroadcast(x, 0u), sum);
  sum = fma(a.y, subgroupBroadcast(x, 1u), sum);
  sum = fma(a.z, subgroupBroadcast(x, 2u), sum);
  sum = fma(a.w, subgroupBroadcast(x, 3u), sum);
  sum = fma(b.x, subgroupBroadcast(x, 4u), sum);
  sum = fma(b.y, subgroupBroadcast(x, 5u), sum);
  sum = fma(b.z, subgroupBroadcast(x, 6u), sum);
  return fma(b.w, subgroupBroadcast(x, 7u), sum);
}

void main() {
  uint lane = gl_SubgroupInvocationID;
  uint n0 = gl_WorkGroupID.x * 8u * OUTPUTS + lane;
  uint row0 = gl_WorkGroupID.y * ROWS;
  uint live = live_rows();
  if (row0 >= live) return;
  Matrix m = matrix();
  uint k8 = walked(m) / 8u;
  float sum[8][8];
#ifdef GATED
  float up[8][8];
#endif
  [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
    [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
      sum[r][j] = 0.0;
#ifdef GATED
      up[r][j] = 0.0;
#endif
    }
  }
  for (uint i = 0u; i < k8; ++i) {
    float x[8];
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
      x[r] = load_value(p.x, (row0 + r) * p.k + x_column(m, 8u * i + lane));
    }
    [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
      uint own = weight_row(min(n0 + 8u * j, p.n - 1u));
      vec4 a, b;
      load_weights8(m, own, i, a, b);
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) sum[r][j] = add8(sum[r][j], a, b, x[r]);
#ifdef GATED
      load_weights8(m, own + 1u, i, a, b);
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) up[r][j] = add8(up[r][j], a, b, x[r]);
#endif
    }
  }
  [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
    [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
      uint n = n0 + 8u * j;
      if (row0 + r < live && n < p.n) {
#ifdef GATED
        finish(row0 + r, n, sum[r][j], up[r][j]);
#else
        finish(row0 + r, n, sum[r][j]);
#endif
      }
    }
  }
}
