// A copy of a in which updates c stand where indices b point: ScatterElements and ScatterND, set or
// reduced. An element of the result looks for the updates that mean it, so that the order of equal
// indices is the order of the updates and no atomic is needed.
//
// Geometry: 64 threads, an element of the result each. Push: a data, b indices, c updates, result,
// table, status; count; node. Elements' table: rank, dims of the data[8], dims of the indices[8],
// strides of the indices[8]; p0 the axis. Tuples': {dims[8], strides[8]} of the indexed axes; p0
// tuples, p1 numbers a tuple chooses, p2 depth of a tuple.
// Constants: 0 tuples or elements, 1 the reduction, 2 the kind of numbers, 3 exact, 4 the type.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const bool TUPLES = false;
layout(constant_id = 1) const uint REDUCTION = 0u;
layout(constant_id = 2) const uint KIND = 0u;
layout(constant_id = 3) const bool EXACT = false;
layout(constant_id = 4) const uint TYPE = 0u;

const uint SET = 0u;
const uint ADD = 1u;
const uint MUL = 2u;
const uint MAX = 3u;
const uint MIN = 4u;

uint joined(uint a, uint b) {
  if (REDUCTION == SET) return b;
  if (KIND == KIND_FLOAT) {
    float x = uintBitsToFloat(a), y = uintBitsToFloat(b);
    if (REDUCTION == ADD) return floatBitsToUint(x + y);
    if (REDUCTION == MUL) return floatBitsToUint(x * y);
    return floatBitsToUint(REDUCTION == MAX ? max_float(x, y) : min_float(x, y));
  }
  if (KIND == KIND_INT) {
    int x = int(a), y = int(b);
    if (REDUCTION == ADD) return uint(add_int(x, y, EXACT));
    if (REDUCTION == MUL) return uint(mul_int(x, y, EXACT));
    return uint(REDUCTION == MAX ? max(x, y) : min(x, y));
  }
  if (REDUCTION == ADD) return add_uint(a, b, EXACT);
  if (REDUCTION == MUL) return mul_uint(a, b, EXACT);
  return REDUCTION == MAX ? max(a, b) : min(a, b);
}

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
  uint word = load_word(p.a, i);
  if (TUPLES) {
    for (uint tuple = 0u; tuple < p.p0; tuple++) {
      uint at = 0u;
      bool found = true;
      for (uint d = 0u; d < p.p2; d++) {
        int index = int(load_word(p.b, tuple * p.p2 + d));
        if (!placed(index, load_word(p.table, d))) found = false;
        at += uint(index) * load_word(p.table, RANK + d);
      }
      if (found && i / p.p1 == at / p.p1) {
        word = joined(word, load_word(p.c, tuple * p.p1 + i % p.p1));
      }
    }
  } else {
    uint rank = load_word(p.table, 0u);
    uint rest = i, base = 0u, mine = 0u;
    bool inside = true;
    for (uint d = rank; d > 0u; d--) {
      uint dim = load_word(p.table, d);
      uint at = rest % dim;
      rest /= dim;
      if (d - 1u == p.p0) {
        mine = at;
      } else {
        if (at >= load_word(p.table, RANK + d)) inside = false;
        base += at * load_word(p.table, 2u * RANK + d);
      }
    }
    if (inside) {
      uint axis_dim = load_word(p.table, p.p0 + 1u);
      uint length = load_word(p.table, RANK + p.p0 + 1u);
      uint stride = load_word(p.table, 2u * RANK + p.p0 + 1u);
      for (uint k = 0u; k < length; k++) {
        int index = int(load_word(p.b, base + k * stride));
        if (placed(index, axis_dim) && uint(index) == mine) {
          word = joined(word, load_word(p.c, base + k * stride));
        }
      }
    }
  }
  store_word(p.result, i, wrapped(word, TYPE));
}
