// Matrix weights as packed words. WEIGHT_Q, WEIGHT_F16 or neither (fp32) picks the format; every one
// offers load_weights8 (eight weights of a row from 8 * i8 on; K is a multiple of 8) and load_weight
// (any weight of a row). fp32 and fp16 also offer load_weight_word (the WORD_WEIGHTS weights of one
// 32-bit word), the others load_quants8 and load_scale.
//
// A row may be longer than K: behind its K weights lie OUTLIERS numbers, which some columns of x are
// multiplied with once more. Kernels walk walked() numbers and read x at x_column(); load_weights8 takes
// both kinds. Only quantised matrices whose rows are a multiple of eight long have outliers.
#ifndef HORNITO_WEIGHTS
#define HORNITO_WEIGHTS

#include "memory.glsl"

// A matrix of `rows` rows of k weights.
struct Matrix {
  Words at;
  uint rows;
  uint k;
};

#if defined(WEIGHT_Q)
#include "quants.glsl"
void load_weights8(Matrix m, uint row, uint i8, out vec4 a, out vec4 b) {
  if (OUTLIERS > 0u && i8 >= m.k / 8u) {
    load_outliers8(m, row, i8 - m.k / 8u, a, b);
    return;
  }
  load_quants8(m, row, i8, a, b);
  if (FORMAT == BF16) return;
  vec2 s = load_scale(m, row, i8);
  a = fma(a, vec4(s.x), vec4(s.y));
  b = fma(b, vec4(s.x), vec4(s.y));
}
// Rows that are no multiple of eight long are bf16.
float load_weight(Matrix m, uint row, uint i) {
  uint at = row * m.k + i;
  uint word = load_word(m.at, at >> 1);
  return uintBitsToFloat((at & 1u) == 0u ? word << 16 : word & 0xffff0000u);
}
#elif defined(WEIGHT_F16)
void load_weights8(Matrix m, uint row, uint i8, out vec4 a, out vec4 b) {
  unpack8(load_words4(m.at, row * (m.k / 8u) + i8), a, b);
}
float load_weight(Matrix m, uint row, uint i) { return load_half(m.at, row * m.k + i); }
const uint WORD_WEIGHTS = 2u;
vec2 load_weight_word(Matrix m, uint row, uint i) {
  return unpackHalf2x16(load_word(m.at, row * (m.k / 2u) + i));
}
#else
void load_weights8(Matrix m, uint row, uint i8, out vec4 a, out vec4 b) {
  uint at = 2u * (row * (m.k / 8u) + i8);
  a = uintBitsToFloat(load_words4(m.at, at));
  b = uintBitsToFloat(load_words4(m.at, at + 1u));
}
float load_weight(Matrix m, uint row, uint i) {
  return uintBitsToFloat(load_word(m.at, row * m.k + i));
}
const uint WORD_WEIGHTS = 1u;
vec2 load_weight_word(Matrix m, uint row, uint i) { return vec2(load_weight(m, row, i), 0.0); }
#endif

#ifdef WEIGHT_Q
uint walked(Matrix m) { return m.k + OUTLIERS; }
uint x_column(Matrix m, uint i) {
  return OUTLIERS == 0u || i < m.k ? i : load_outlier_column(m, i - m.k);
}
#else
uint walked(Matrix m) { return m.k; }
uint x_column(Matrix m, uint i) { return i; }
#endif

#endif
