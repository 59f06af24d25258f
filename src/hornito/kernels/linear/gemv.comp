// Linear for few rows on GPUs: LANES threads share OUTS weight rows and stride through their weights in
// coalesced words; their sums join in a fixed order. A norm of x may come first.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
// variant: tree_f32 TREE
// variant: tree_f16 WEIGHT_F16 TREE
// variant: tree_q WEIGHT_Q TREE
// variant: tree_gated_f32 GATED TREE
// variant: tree_gated_f16 GATED WEIGHT_F16 TREE
// variant: tree_gated_q GATED WEIGHT_Q TREE
//
// Geometry: 128 threads = LANES x (128 / LANES) groups of OUTS weight rows (x); ROWS rows of x a
// workgroup (y).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 ROWS (1 to 4), 4 WIDE (K is a multiple of 8, or
// of 16 where weights are quantised), 5 LANES (a power of two, 8 to 128), 6 SOFTCAP, 7 FORMAT, 8 GROUP,
// 9 OUTLIERS, 10 NORM, 11 OUTS (1, 2, 4 or 8; even with GATED; LANES at most; 8 where ROWS is 1).
// Requires: full subgroups of at least 4, subgroup shuffle operations; with TREE nothing.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "linear.glsl"
#include "gemv.glsl"

layout(local_size_x = 128) in;

uint live;  // rows of x

// The first output of this thread's group.
uint first_output() {
  uint group = gl_WorkGroupID.x * (128u / LANES) + thread() / LANES;
  return group * (OUTS / OUTPUT_ROWS);
}

void group_rows(out uint rows[8]) {
  uint n = first_output();
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
    rows[o] = weight_row(min(n + o / OUTPUT_ROWS, p.n - 1u)) + o % OUTPUT_ROWS;
  }
}

void row_end(uint r) {
  uint lane = thread() % LANES;
  uint group = thread() / LANES;
  uint n = first_output() + lane;
  if (r >= live || lane >= OUTS / OUTPUT_ROWS || n >= p.n) return;
  float factor = norm_factor(group, p.k, p.eps);
#ifdef GATED
  finish(r, n, joined(group, 2u * lane) * factor, joined(group, 2u * lane + 1u) * factor);
#else
  finish(r, n, joined(group, lane) * factor);
#endif
}

void main() {
  live = live_rows();
  if (gl_WorkGroupID.y * ROWS >= live) return;
  run_rows(p.x, p.norm, matrix());
}
