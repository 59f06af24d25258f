// Running sums or products along one axis of a [outer, length, inner].
//
// Geometry: 64 threads, one line of the axis each. Push: a, result, status; count of lines; node;
// p0 length; p1 inner; p2 bit 0 exclusive, bit 1 from the end.
// Constants: 0 whether it multiplies, 1 the kind of numbers, 2 whether integers must be exact,
// 3 the type to wrap to.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const bool PRODUCT = false;
layout(constant_id = 1) const uint KIND = 0u;
layout(constant_id = 2) const bool EXACT = false;
layout(constant_id = 3) const uint TYPE = 0u;

uint joined(uint a, uint b) {
  if (KIND == KIND_FLOAT) {
    float x = uintBitsToFloat(a), y = uintBitsToFloat(b);
    return floatBitsToUint(PRODUCT ? x * y : x + y);
  }
  if (KIND == KIND_INT) {
    return uint(PRODUCT ? mul_int(int(a), int(b), EXACT) : add_int(int(a), int(b), EXACT));
  }
  return PRODUCT ? mul_uint(a, b, EXACT) : add_uint(a, b, EXACT);
}

void main() {
  uint line = element();
  if (line >= p.count) return;
  uint base = (line / p.p1) * p.p0 * p.p1 + line % p.p1;
  bool exclusive = (p.p2 & 1u) != 0u, reverse = (p.p2 & 2u) != 0u;
  uint one = KIND == KIND_FLOAT ? floatBitsToUint(1.0) : 1u;
  uint total = PRODUCT ? one : 0u;
  for (uint i = 0u; i < p.p0; i++) {
    uint at = base + (reverse ? p.p0 - 1u - i : i) * p.p1;
    uint next = joined(total, load_word(p.a, at));
    store_word(p.result, at, wrapped(exclusive ? total : next, TYPE));
    total = next;
  }
}
