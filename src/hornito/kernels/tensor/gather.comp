// Elements of a chosen by indices in b: Gather, GatherElements, GatherND, OneHot. An index outside
// its axis sets the node's status and reads nothing; negative ones count from the end.
//
// Geometry: 64 threads, an element of the result each. Push: a data, b indices, result, table,
// status; count; node; p0 the axis' length; p1 numbers behind the axis; p2 indices a slice.
// GatherElements' table: rank, dims of the indices[8], strides of the data[8], p2 is the axis.
// GatherND's: depth of a tuple p2, p3 tuples a batch, p0 numbers of a data batch, {dims[8],
// strides[8]} of the indexed axes, p1 numbers a tuple chooses. OneHot: a is {off, on}.
// Constant 0: which of them.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint MODE = 0u;

const uint GATHER = 0u;
const uint ELEMENTS = 1u;
const uint TUPLES = 2u;
const uint ONE_HOT = 3u;

// Whether index i lies in [-n, n); then it is made to count from the start.
bool placed(inout int i, uint n) {
  if (i < -int(n) || i >= int(n)) {
    report(STATUS_INDEX);
    return false;
  }
  if (i < 0) i += int(n);
  return true;
}

void main() {
  uint i = element();
  if (i >= p.count) return;
  uint from = 0u;
  bool found = true;
  if (MODE == GATHER) {
    int index = int(load_word(p.b, (i / p.p1) % p.p2));
    found = placed(index, p.p0);
    from = (i / (p.p1 * p.p2) * p.p0 + uint(index)) * p.p1 + i % p.p1;
  } else if (MODE == ELEMENTS) {
    int index = int(load_word(p.b, i));
    found = placed(index, p.p0);
    uint rest = i;
    for (uint d = load_word(p.table, 0u); d > 0u; d--) {
      uint dim = load_word(p.table, d);
      uint at = d - 1u == p.p2 ? uint(index) : rest % dim;
      from += at * load_word(p.table, RANK + d);
      rest /= dim;
    }
  } else if (MODE == TUPLES) {
    uint tuple = i / p.p1;
    from = tuple / p.p3 * p.p0 + i % p.p1;
    for (uint d = 0u; d < p.p2; d++) {
      int index = int(load_word(p.b, tuple * p.p2 + d));
      if (!placed(index, load_word(p.table, d))) found = false;
      from += uint(index) * load_word(p.table, RANK + d);
    }
  } else {
    uint at = (i / p.p1) % p.p0;
    int index = int(load_word(p.b, i / (p.p1 * p.p0) * p.p1 + i % p.p1));
    if (index < 0) index += int(p.p0);
    from = index >= 0 && uint(index) == at ? 1u : 0u;
  }
  uint word = 0u;
  if (found) word = load_word(p.a, from);
  store_word(p.result, i, word);
}
