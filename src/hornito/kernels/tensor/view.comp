// result[i] = a[sum of one map entry per axis of i], or a fill word where an entry is MISSING.
//
// Transposes, slices, expansions, tiles, pads of every mode and concatenations are this, with maps
// that the host makes. Geometry: 64 threads, an element each.
// Push: a, result, table {rank, dims[8], start of each axis's map[8], maps}; count of elements; p0
// the fill word; element i goes to (i / p1) * p2 + p3 + i % p1.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "tensor.glsl"

layout(local_size_x = 64) in;

const uint MISSING = 0xffffffffu;

void main() {
  uint i = element();
  if (i >= p.count) return;
  uint rank = load_word(p.table, 0u);
  uint rest = i;
  uint from = 0u;
  bool missing = false;
  for (uint d = rank; d > 0u; d--) {
    uint dim = load_word(p.table, d);
    uint entry = load_word(p.table, load_word(p.table, RANK + d) + rest % dim);
    rest /= dim;
    if (entry == MISSING) missing = true;
    else from += entry;
  }
  uint word = p.p0;
  if (!missing) word = load_word(p.a, from);
  store_word(p.result, (i / p.p1) * p.p2 + p.p3 + i % p.p1, word);
}
