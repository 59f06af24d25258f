// From one row of x to q and the cache, as gemv_append.comp, of weights of 4 or 8 bits by integer dot
// products (digits.glsl).
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 256 threads = LANES x (256 / LANES) groups of a pair of dims that turn together, a tile (x
// covers all heads' pairs, with any number of workgroups).
// Push: see append.glsl.
// Specialisation: 0 BIAS, 5 LANES (a power of two, 4 to 32), 7 FORMAT (int8, int4, int4m), 8 GROUP,
// 9 OUTLIERS, 10 NORM, 12 SPLITS (1), 13 CHUNKS, 14 DIGITS (2 or 3).
// Requires: integer dot products, full subgroups of at least LANES, subgroup shuffle operations.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define WEIGHT_Q
#include "append.glsl"
#include "digits.glsl"

// Of the row, brought while sums are made.
shared uint position;
shared uvec2 block;
shared uint live;  // 1, or 0: then the others are nothing

uvec2 group_rows(uint group) { return pair_rows(group); }

// Neighbouring pairs, which share words of the cache, are stored by one thread.
void tile_end(uint tile, uint at) {
  uint t = thread();
  if (t >= GROUPS / 2u || live == 0u) return;
  vec2 a = group_sums[at + 2u * t];
  vec2 b = group_sums[at + 2u * t + 1u];
  end_pairs(0u, position, Words(block), tile * GROUPS + 2u * t, vec2(a.x, b.x), vec2(a.y, b.y));
}

void main() {
  if (thread() == THREADS - 1u) {  // whose part of x is the smallest
    Row row = load_row(p.rows, 0u);
    live = uint(row.live);
    position = row.position;
    if (row.live) block = uvec2(row_block(row));  // what is not live may point anywhere
  }
  run_tiles(p.x, p.norm, matrix(), (all_pairs() + GROUPS - 1u) / GROUPS, p.eps);
}
