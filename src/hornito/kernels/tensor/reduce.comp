// One number of every row of a [rows, width]: sum, product, norm, largest, its index, ...
//
// Geometry: a workgroup of 64 threads a row; partial results are joined in a fixed order.
// Push: a, result, status; count of rows; node; p0 width; p1 = 1 picks the last of equal ones.
// Constants: 0 the operator, 1 the kind of numbers, 2 whether results must be exact (64-bit types),
// 3 the type that sums wrap to.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint OP = 0u;
layout(constant_id = 1) const uint KIND = 0u;
layout(constant_id = 2) const bool EXACT = false;
layout(constant_id = 3) const uint TYPE = 0u;

const uint SUM = 0u;
const uint MEAN = 1u;
const uint MAX = 2u;
const uint MIN = 3u;
const uint PROD = 4u;
const uint L1 = 5u;
const uint L2 = 6u;
const uint SUM_SQUARE = 7u;
const uint LOG_SUM = 8u;
const uint LOG_SUM_EXP = 9u;
const uint ARG_MAX = 10u;
const uint ARG_MIN = 11u;

const bool BEST = OP == MAX || OP == MIN || OP == ARG_MAX || OP == ARG_MIN || OP == LOG_SUM_EXP;
const uint NONE = 0xffffffffu;

shared uint part[64];
shared uint index_of[64];

bool better(uint a, uint b) {
  bool low = OP == MIN || OP == ARG_MIN;
  if (KIND == KIND_FLOAT) {
    if (nan_word(b)) return false;
    if (nan_word(a)) return true;
    float x = uintBitsToFloat(a), y = uintBitsToFloat(b);
    return low ? x < y : x > y;
  }
  if (KIND == KIND_INT) return low ? int(a) < int(b) : int(a) > int(b);
  return low ? a < b : a > b;
}

uint prepared(uint w, float top) {
  if (KIND == KIND_FLOAT) {
    float v = uintBitsToFloat(w);
    if (OP == L1) return floatBitsToUint(abs(v));
    if (OP == L2 || OP == SUM_SQUARE) return floatBitsToUint(v * v);
    if (OP == LOG_SUM_EXP) return floatBitsToUint(exp(v - top));
    return w;
  }
  if (KIND == KIND_INT) {
    if (OP == L1) return int(w) < 0 ? uint(sub_int(0, int(w), EXACT)) : w;
    if (OP == L2 || OP == SUM_SQUARE) return uint(mul_int(int(w), int(w), EXACT));
    return w;
  }
  if (OP == L2 || OP == SUM_SQUARE) return mul_uint(w, w, EXACT);
  return w;
}

uint joined(uint a, uint b) {
  if (KIND == KIND_FLOAT) {
    float x = uintBitsToFloat(a), y = uintBitsToFloat(b);
    return floatBitsToUint(OP == PROD ? x * y : x + y);
  }
  if (KIND == KIND_INT) {
    int x = int(a), y = int(b);
    return uint(OP == PROD ? mul_int(x, y, EXACT) : add_int(x, y, EXACT));
  }
  return OP == PROD ? mul_uint(a, b, EXACT) : add_uint(a, b, EXACT);
}

bool takes(uint word, uint at, uint other, uint other_at) {
  if (at == NONE) return false;
  if (other_at == NONE || better(word, other)) return true;
  if (better(other, word)) return false;
  return p.p1 == 1u ? at > other_at : at < other_at;
}

void find_best(uint base, uint t) {
  uint word = 0u, at = NONE;
  for (uint i = t; i < p.p0; i += 64u) {
    uint w = load_word(p.a, base + i);
    if (takes(w, i, word, at)) {
      word = w;
      at = i;
    }
  }
  part[t] = word;
  index_of[t] = at;
  [[dont_unroll]] for (uint half_size = 32u; half_size > 0u; half_size >>= 1) {
    barrier();
    if (t < half_size) {
      uint o = t + half_size;
      if (takes(part[o], index_of[o], part[t], index_of[t])) {
        part[t] = part[o];
        index_of[t] = index_of[o];
      }
    }
  }
  barrier();
}

void main() {
  uint row = this_row();
  uint t = gl_LocalInvocationIndex;
  if (row >= p.count) return;
  uint base = row * p.p0;
  float top = 0.0;
  if (BEST) {
    find_best(base, t);
    if (OP != LOG_SUM_EXP) {
      if (t == 0u) store_word(p.result, row, OP == ARG_MAX || OP == ARG_MIN ? index_of[0] : part[0]);
      return;
    }
    top = uintBitsToFloat(part[0]);
    if (inf_word(part[0])) top = 0.0;
    barrier();
  }
  uint one = KIND == KIND_FLOAT ? floatBitsToUint(1.0) : 1u;
  uint sum = OP == PROD ? one : 0u;
  for (uint i = t; i < p.p0; i += 64u) sum = joined(sum, prepared(load_word(p.a, base + i), top));
  part[t] = sum;
  [[dont_unroll]] for (uint half_size = 32u; half_size > 0u; half_size >>= 1) {
    barrier();
    if (t < half_size) part[t] = joined(part[t], part[t + half_size]);
  }
  if (t != 0u) return;
  uint total = part[0];
  if (KIND == KIND_FLOAT) {
    float v = uintBitsToFloat(total);
    if (OP == MEAN) v /= float(p.p0);
    if (OP == L2) v = sqrt(v);
    if (OP == LOG_SUM) v = log(v);
    if (OP == LOG_SUM_EXP) v = log(v) + top;
    total = floatBitsToUint(v);
  } else if (OP == MEAN) {
    total = KIND == KIND_INT ? uint(int(total) / int(p.p0)) : total / p.p0;
  } else if (OP == L2) {
    total = uint(sqrt(float(total)));
  } else if (OP == LOG_SUM) {
    total = uint(log(float(total)));
  }
  store_word(p.result, row, wrapped(total, TYPE));
}
