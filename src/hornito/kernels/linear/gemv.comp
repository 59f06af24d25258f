// Linear for few rows on GPUs: LANES threads share OUTS weight rows and stride through their weights in
// coalesced words; their sums join in a fixed tree. A norm of x may come first.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: d WEIGHT_Q DIGITS
// variant: gated_d GATED WEIGHT_Q DIGITS
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
//
// Geometry: 128 threads = LANES x (128 / LANES) groups of OUTS weight rows (x); ROWS rows of x a
// workgroup (y).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 ROWS (1 to 4), 4 WIDE (K is a multiple of 8, or
// of 16 where weights are quantised), 5 LANES (a power of two, 8 to 128), 6 SOFTCAP, 7 FORMAT, 8 GROUP,
// 9 OUTLIERS, 10 NORM, 11 OUTS (1, 2, 4 or 8; even with GATED; LANES at least; 8 where ROWS is 1).
// Requires: of d integer dot products; ROWS is 1, LANES 8 to 64 (gemv_digits.glsl).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef DIGITS
#extension GL_EXT_spirv_intrinsics : require
#endif
#include "linear.glsl"
#include "gemv.glsl"

layout(local_size_x = 128) in;

void main() {
  uint t = gl_LocalInvocationID.x;
  uint row0 = gl_WorkGroupID.y * ROWS;
  uint live = live_rows();
  if (row0 >= live) return;
  uint outputs = OUTS / OUTPUT_ROWS;
  uint n0 = (gl_WorkGroupID.x * (128u / LANES) + t / LANES) * outputs;
  uint weight[8];
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
    weight[o] = weight_row(min(n0 + o / OUTPUT_ROWS, p.n - 1u)) + o % OUTPUT_ROWS;
  }
  sum_rows(p.x, p.norm, matrix(), row0, weight);
  uint first = t - t % LANES;
  [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
    join_row(r);
    uint n = n0 + t % LANES;
    if (row0 + r < live && t % LANES < outputs && n < p.n) {
      float factor = norm_factor(first, p.k, p.eps);
      uint at = t % LANES * OUTPUT_ROWS * 128u + first;
#ifdef GATED
      finish(row0 + r, n, tree[at] * factor, tree[at + 128u] * factor);
#else
      finish(row0 + r, n, tree[at] * factor);
#endif
    }
  }
}
