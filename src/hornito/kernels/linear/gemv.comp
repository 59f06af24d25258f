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
// Geometry: 128 threads = LANES x (128 / LANES) groups of OUTS weight rows, a tile (x; of d any number of
// workgroups); ROWS rows of x a workgroup (y); of d splits of K (z).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 ROWS (1 to 4), 4 WIDE (K is a multiple of 8, or
// of 16 where weights are quantised), 5 LANES (a power of two, 8 to 128), 6 SOFTCAP, 7 FORMAT, 8 GROUP,
// 9 OUTLIERS, 10 NORM, 11 OUTS (1, 2, 4 or 8; even with GATED; LANES at least; 8 where ROWS is 1),
// and of d 12 SPLITS (at most 8), 13 UNITS (gemv_digits.glsl).
// Requires: of d integer dot products; ROWS is 1.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef DIGITS
#extension GL_EXT_spirv_intrinsics : require
#include "arrival.glsl"
#endif
#include "linear.glsl"
#include "gemv.glsl"

layout(local_size_x = 128) in;

uint live;  // rows of x

// The first output that this thread's group has of a tile.
uint first_output(uint tile) {
  return (tile * (128u / LANES) + gl_LocalInvocationID.x / LANES) * (OUTS / OUTPUT_ROWS);
}

void tile_rows(uint tile, out uint rows[8]) {
  uint n = first_output(tile);
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
    rows[o] = weight_row(min(n + o / OUTPUT_ROWS, p.n - 1u)) + o % OUTPUT_ROWS;
  }
}

// Ends output n of row r of x from its weight rows' sums.
void finish_sums(uint r, uint n, vec2 sums) {
#ifdef GATED
  finish(r, n, sums.x, sums.y);
#else
  finish(r, n, sums.x);
#endif
}

#ifdef DIGITS
// Of the parts of K, the one that comes last adds them all in their order: who that is does not change a
// bit. Every thread of the workgroup must call it.
void join_splits(uint tile) {
  if (!arrives_last(p.counters, tile, SPLITS)) return;
  uint outputs = 128u / LANES * (OUTS / OUTPUT_ROWS);
  uint n = tile * outputs + gl_LocalInvocationID.x;
  if (gl_LocalInvocationID.x >= outputs || n >= p.n) return;
  vec2 parts[8];
  [[unroll]] for (uint s = 0u; s < SPLITS; ++s) {
    uint from = (s * p.n + n) * OUTPUT_ROWS;
    parts[s].x = Passed(uvec2(p.sums)).at[from];
    parts[s].y = Passed(uvec2(p.sums)).at[from + OUTPUT_ROWS - 1u];
  }
  [[unroll]] for (uint s = 1u; s < SPLITS; ++s) parts[0] += parts[s];
  finish_sums(0u, n, parts[0]);
}
#endif

void tile_end(uint tile, uint r) {
  uint lane = gl_LocalInvocationID.x % LANES;
  uint first = gl_LocalInvocationID.x - lane;
  uint n = first_output(tile) + lane;
  if (r < live && lane < OUTS / OUTPUT_ROWS && n < p.n) {
    uint at = lane * OUTPUT_ROWS * 128u + first;
    vec2 sums = vec2(tree[at], tree[at + 128u * (OUTPUT_ROWS - 1u)]) * norm_factor(first, p.k, p.eps);
#ifdef DIGITS
    if (SPLITS > 1u) {
      uint to = (gl_WorkGroupID.z * p.n + n) * OUTPUT_ROWS;
      [[unroll]] for (uint o = 0u; o < OUTPUT_ROWS; ++o) Passed(uvec2(p.sums)).at[to + o] = sums[o];
    } else {
      finish_sums(r, n, sums);
    }
#else
    finish_sums(r, n, sums);
#endif
  }
#ifdef DIGITS
  if (SPLITS > 1u) join_splits(tile);
#endif
}

void main() {
  live = live_rows();
  if (gl_WorkGroupID.y * ROWS >= live) return;
  uint rows = 128u / LANES * OUTS;
  run_tiles(p.x, p.norm, matrix(), (p.n * OUTPUT_ROWS + rows - 1u) / rows);
}
