// The k best of every row of a [rows, width], in order, with their indices; equal ones by index.
//
// Geometry: 64 threads, an element each, which finds its own rank.
// Push: a, b (indices out), result (values out); count of elements; p0 width; p1 k; p2 = 1 picks
// the largest. Constant 0: the kind of numbers.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint KIND = 0u;

bool less(uint a, uint b) {
  if (KIND == KIND_FLOAT) {
    if (nan_word(a)) return false;  // NaN is above all numbers
    if (nan_word(b)) return true;
    return uintBitsToFloat(a) < uintBitsToFloat(b);
  }
  if (KIND == KIND_INT) return int(a) < int(b);
  return a < b;
}

void main() {
  uint i = element();
  if (i >= p.count) return;
  uint row = i / p.p0, at = i % p.p0;
  uint mine = load_word(p.a, i);
  uint rank = 0u;
  for (uint j = 0u; j < p.p0 && rank < p.p1; j++) {
    uint other = load_word(p.a, row * p.p0 + j);
    bool ahead = p.p2 == 1u ? less(mine, other) : less(other, mine);
    bool behind = p.p2 == 1u ? less(other, mine) : less(mine, other);
    if (ahead || (!behind && j < at)) rank++;
  }
  if (rank >= p.p1) return;
  store_word(p.result, row * p.p1 + rank, mine);
  store_word(p.b, row * p.p1 + rank, at);
}
