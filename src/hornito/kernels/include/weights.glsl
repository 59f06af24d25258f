// Matrix weights as packed words. WEIGHT_F16 or WEIGHT_F32 picks the format; every format offers
// load_weights8 (eight weights from an index that is a multiple of 8), load_weight (any index) and
// load_weight_word (the WORD_WEIGHTS weights of one 32-bit word).
#ifndef HORNITO_WEIGHTS
#define HORNITO_WEIGHTS

#include "memory.glsl"

#ifdef WEIGHT_F16
void load_weights8(Words w, uint i8, out vec4 a, out vec4 b) {
  uvec4 q = load_words4(w, i8);
  a = vec4(unpackHalf2x16(q.x), unpackHalf2x16(q.y));
  b = vec4(unpackHalf2x16(q.z), unpackHalf2x16(q.w));
}
float load_weight(Words w, uint i) { return load_half(w, i); }
const uint WORD_WEIGHTS = 2u;
vec2 load_weight_word(Words w, uint i) { return unpackHalf2x16(load_word(w, i)); }
#else
void load_weights8(Words w, uint i8, out vec4 a, out vec4 b) {
  a = uintBitsToFloat(load_words4(w, 2u * i8));
  b = uintBitsToFloat(load_words4(w, 2u * i8 + 1u));
}
float load_weight(Words w, uint i) { return uintBitsToFloat(load_word(w, i)); }
const uint WORD_WEIGHTS = 1u;
vec2 load_weight_word(Words w, uint i) { return vec2(uintBitsToFloat(load_word(w, i)), 0.0); }
#endif

#endif
