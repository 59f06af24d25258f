// Linear for one row of x and weights of 4 or 8 bits on GPUs, by integer dot products (digits.glsl). A norm
// of x may come first.
//
// variant: default
// variant: gated GATED
//
// Geometry: 256 threads = LANES x (256 / LANES) groups of two weight rows, a tile (x; any number of
// workgroups); SPLITS of K (z).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 5 LANES (a power of two, 4 to 32), 6 SOFTCAP, 7 FORMAT
// (int8, int4, int4m), 8 GROUP, 9 OUTLIERS, 10 NORM, 12 SPLITS (at most 8; 1 with NORM), 13 CHUNKS, 14 DIGITS
// (2 or 3).
// Requires: integer dot products, full subgroups of at least LANES, subgroup shuffle operations.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define WEIGHT_Q
#define JOINS
#include "arrival.glsl"
#include "linear.glsl"
#include "digits.glsl"

// Outputs of a tile, and the first of a group.
const uint OUTPUTS = 2u / OUTPUT_ROWS * GROUPS;
uint first_output(uint group) { return group * (2u / OUTPUT_ROWS); }

uvec2 group_rows(uint group) {
  uint n = first_output(group);
#ifdef GATED
  uint row = weight_row(min(n, p.n - 1u));
  return uvec2(row, row + 1u);
#else
  return uvec2(weight_row(min(n, p.n - 1u)), weight_row(min(n + 1u, p.n - 1u)));
#endif
}

// Ends the i-th output of a tile from its group's sums.
void finish_sums(uint tile, uint i, vec2 sums) {
  uint n = tile * OUTPUTS + i;
  if (n >= p.n) return;
#ifdef GATED
  finish(0u, n, sums.x, sums.y);
#else
  finish(0u, n, sums[i % 2u]);
#endif
}

// Of the parts of K, the one that comes last adds them all in their order: who that is does not change a
// bit. Every thread of the workgroup must call it.
void join_splits(uint tile, uint at) {
  uint t = thread();
  uint groups = (p.n * OUTPUT_ROWS + 1u) / 2u;
  uint group = tile * GROUPS + t;
  Passed2 sums = Passed2(uvec2(p.sums));
  if (t < GROUPS && group < groups) sums.at[gl_WorkGroupID.z * groups + group] = group_sums[at + t];
  if (!arrives_last(p.counters, tile, SPLITS)) return;
  group = tile * GROUPS + t * GROUPS / OUTPUTS;
  if (t >= OUTPUTS || group >= groups) return;
  vec2 parts[8];
  [[unroll]] for (uint s = 0u; s < SPLITS; ++s) parts[s] = sums.at[s * groups + group];
  [[unroll]] for (uint s = 1u; s < SPLITS; ++s) parts[0] += parts[s];
  finish_sums(tile, t, parts[0]);
}

void tile_end(uint tile, uint at) {
  if (SPLITS > 1u) {
    join_splits(tile, at);
    return;
  }
  uint t = thread();
  if (t < OUTPUTS) finish_sums(tile, t, group_sums[at + t * GROUPS / OUTPUTS]);
}

void main() {
  if (live_rows() == 0u) return;
  run_tiles(p.x, p.norm, matrix(), (p.n + OUTPUTS - 1u) / OUTPUTS, p.eps);
}
