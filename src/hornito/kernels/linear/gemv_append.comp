// From few rows of x to q and the cache: the projections of q, k and v (one matrix [q; k; v]), behind a
// norm of x if there is one, with bias, RoPE on q and k, q into its own buffer, k and v into the slot's
// KV block. Twin of rms_norm, gemv.comp and rotate_append.comp.
//
// variant: kv32_f32
// variant: kv32_f16 WEIGHT_F16
// variant: kv32_q WEIGHT_Q
// variant: kv16_f32 KV_F16
// variant: kv16_f16 KV_F16 WEIGHT_F16
// variant: kv16_q KV_F16 WEIGHT_Q
// variant: tree_kv32_f32 TREE
// variant: tree_kv32_f16 WEIGHT_F16 TREE
// variant: tree_kv32_q WEIGHT_Q TREE
// variant: tree_kv16_f32 KV_F16 TREE
// variant: tree_kv16_f16 KV_F16 WEIGHT_F16 TREE
// variant: tree_kv16_q KV_F16 WEIGHT_Q TREE
//
// Geometry: 128 threads = LANES x (128 / LANES) groups of OUTS / 2 pairs of dims that turn together (x
// covers all heads' pairs); ROWS rows of x a workgroup (y).
// Push: see append.glsl.
// Specialisation: 0 BIAS, 3 ROWS (1 to 4), 4 WIDE, 5 LANES (a power of two, 8 to 128), 7 FORMAT, 8 GROUP,
// 9 OUTLIERS, 10 NORM, 11 OUTS (2 where LANES is 64 at most, 4 or 8; 8 where ROWS is 1).
// Requires: full subgroups of at least 4, subgroup shuffle operations; with TREE nothing.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "append.glsl"
#include "gemv.glsl"

layout(local_size_x = 128) in;

// The first pair of this thread's group.
uint first_pair() {
  return (gl_WorkGroupID.x * (128u / LANES) + thread() / LANES) * (OUTS / 2u);
}

void group_rows(out uint rows[8]) {
  [[unroll]] for (uint j = 0u; j < OUTS / 2u; ++j) {
    uvec2 pair = pair_rows(first_pair() + j);
    rows[2u * j] = pair.x;
    rows[2u * j + 1u] = pair.y;
  }
}

// Neighbouring pairs, which share words of the cache, are stored by one thread: those of two groups where
// a group has one.
void row_end(uint r) {
  uint lane = thread() % LANES;
  uint group = thread() / LANES;
  bool stores = OUTS == 2u ? lane == 0u && group % 2u == 0u : lane < OUTS / 4u;
  if (!stores || r >= p.count) return;
  uint other = OUTS == 2u ? group + 1u : group;
  uint a = OUTS == 2u ? 0u : 4u * lane;
  uint b = OUTS == 2u ? 0u : 4u * lane + 2u;
  float factor = norm_factor(group, p.k, p.eps);
  vec2 lo = vec2(joined(group, a), joined(other, b)) * factor;
  vec2 hi = vec2(joined(group, a + 1u), joined(other, b + 1u)) * factor;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  end_pairs(r, row.position, row_block(row), first_pair() + 2u * lane, lo, hi);
}

void main() { run_rows(p.x, p.norm, matrix()); }
