// result[z] = x * a[z] @ b[z] (+ y * c, which broadcasts), batches found through a table.
//
// Geometry: 64 threads make a square tile, PER x PER numbers each (4: 32 x 32, 8: 64 x 64); group x
// over columns, y over rows, z over batches. Depth goes in steps of 8 through shared memory; sums run
// in the order of k, whatever the tile.
// Push: a, b, c, result, table {M, N, K, strides of a in m and k, of b in k and n, of c in m and n,
// then per batch the start of a, b}; x scales the product, y scales c.
// Constants: 0 the kind of numbers, 1 whether there is a c, 2 whether integers must be exact.
// variant: t32 PER=4
// variant: t64 PER=8
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KIND = 0u;
layout(constant_id = 1) const bool HAS_C = false;
layout(constant_id = 2) const bool EXACT = false;

const uint TILE = 8u * PER;
const uint DEPTH = 8u;

shared uint tile_a[TILE * DEPTH];
shared uint tile_b[TILE * DEPTH];

uint fused(uint sum, uint a, uint b) {
  if (KIND == KIND_FLOAT) {
    float v = uintBitsToFloat(sum) + uintBitsToFloat(a) * uintBitsToFloat(b);
    return floatBitsToUint(v);
  }
  if (KIND == KIND_INT) return uint(add_int(int(sum), mul_int(int(a), int(b), EXACT), EXACT));
  return add_uint(sum, mul_uint(a, b, EXACT), EXACT);
}

void main() {
  uint m = load_word(p.table, 0u), n = load_word(p.table, 1u), depth = load_word(p.table, 2u);
  uint a_m = load_word(p.table, 3u), a_k = load_word(p.table, 4u);
  uint b_k = load_word(p.table, 5u), b_n = load_word(p.table, 6u);
  uint z = gl_WorkGroupID.z;
  uint a_at = load_word(p.table, 9u + 2u * z), b_at = load_word(p.table, 10u + 2u * z);
  uint t = gl_LocalInvocationIndex;
  uint row = gl_WorkGroupID.y * TILE, column = gl_WorkGroupID.x * TILE;
  uint r = (t >> 3) * PER, q = (t & 7u) * PER;
  uint sums[PER * PER];
  [[unroll]] for (uint i = 0u; i < PER * PER; i++) sums[i] = 0u;
  for (uint k = 0u; k < depth; k += DEPTH) {
    barrier();
    for (uint i = t; i < TILE * DEPTH; i += 64u) {
      uint at_k = k + (i & 7u), at = i >> 3;
      bool inside = at_k < depth;
      tile_a[(i & 7u) * TILE + at] =
          inside && row + at < m ? load_word(p.a, a_at + (row + at) * a_m + at_k * a_k) : 0u;
      at_k = k + i / TILE;
      at = i % TILE;
      inside = at_k < depth;
      tile_b[i] =
          inside && column + at < n ? load_word(p.b, b_at + at_k * b_k + (column + at) * b_n) : 0u;
    }
    barrier();
    for (uint d = 0u; d < DEPTH; d++) {
      uint right[PER];
      [[unroll]] for (uint j = 0u; j < PER; j++) right[j] = tile_b[d * TILE + q + j];
      [[unroll]] for (uint i = 0u; i < PER; i++) {
        uint left = tile_a[d * TILE + r + i];
        [[unroll]] for (uint j = 0u; j < PER; j++)
          sums[i * PER + j] = fused(sums[i * PER + j], left, right[j]);
      }
    }
  }
  [[unroll]] for (uint i = 0u; i < PER; i++) {
    [[unroll]] for (uint j = 0u; j < PER; j++) {
      uint at_m = row + r + i, at_n = column + q + j;
      if (at_m >= m || at_n >= n) continue;
      uint word = sums[i * PER + j];
      if (KIND == KIND_FLOAT) {
        float v = uintBitsToFloat(word) * p.x;
        if (HAS_C) {
          uint c_at = at_m * load_word(p.table, 7u) + at_n * load_word(p.table, 8u);
          v += p.y * uintBitsToFloat(load_word(p.c, c_at));
        }
        word = floatBitsToUint(v);
      }
      store_word(p.result, (z * m + at_m) * n + at_n, word);
    }
  }
}
