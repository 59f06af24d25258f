// Weights for cooperative matrices in two steps: load_raw8 fetches eight weights of a row as they lie in
// memory, decode_raw8 makes fp16 of them later, so that nothing waits for a load while matrices are
// multiplied. K is a multiple of 8; behind it come the row's outliers. What fp16 can't hold saturates or is rounded to nearest even.
#ifndef HORNITO_RAW
#define HORNITO_RAW

#include "halves.glsl"
#include "weights.glsl"

#ifdef WEIGHT_F16
uvec4 load_raw8(Matrix m, uint row, uint i8) {
  return load_words4(m.at, row * (m.k / 8u) + i8);
}

uvec4 decode_raw8(Matrix m, uint row, uint i8, uvec4 raw) { return raw; }
#else
// Whether these are outliers of the row (weights.glsl).
bool is_outlier8(Matrix m, uint i8) { return OUTLIERS > 0u && i8 >= m.k / 8u; }

// Of formats with a plain scale x and y have the integers, z the scale's word.
uvec4 load_raw8(Matrix m, uint row, uint i8) {
  if (is_outlier8(m, i8)) {
    return load_words4(m.at, outliers_at(m) / 4u + row * (OUTLIERS / 8u) + i8 - m.k / 8u);
  }
  uint at = row * (m.k / 8u) + i8;
  if (FORMAT == BF16) return load_words4(m.at, at);
  if (has_plain_scale()) {
    uint scale = load_scale_word(m, row * (m.k / GROUP) + i8 / (GROUP / 8u));
    if (FORMAT == INT8) return uvec4(load_words2(m.at, at), scale, 0u);
    return uvec4(load_word(m.at, at), 0u, scale, 0u);
  }
  vec2 scale = load_scale(m, row, i8);
  uint high = has_high_bits() ? load_high_bits(m, at) : 0u;
  return uvec4(load_word(m.at, at), high, floatBitsToUint(scale));
}

f16vec2 two_halves(uint w) { return unpackFloat2x16(w); }

// Four pairs of 1024 + integer: an integer of up to ten bits in the low bits of a half of 1024.
uvec4 decode_raw8(Matrix m, uint row, uint i8, uvec4 raw) {
  if (is_outlier8(m, i8)) return raw;
  if (FORMAT == BF16) {
    vec4 a = uintBitsToFloat(uvec4(raw.x << 16, raw.x & 0xffff0000u, raw.y << 16, raw.y & 0xffff0000u));
    vec4 b = uintBitsToFloat(uvec4(raw.z << 16, raw.z & 0xffff0000u, raw.w << 16, raw.w & 0xffff0000u));
    return pack8(a, b);
  }
  if (!has_plain_scale()) {
    uvec4 x, y;
    nibbles(raw.x, x, y);
    if (has_high_bits()) add_high_bits(raw.y, x, y);
    vec2 s = uintBitsToFloat(raw.zw);
    return pack8(fma(vec4(x), vec4(s.x), vec4(s.y)), fma(vec4(y), vec4(s.x), vec4(s.y)));
  }
  f16vec2 pair = two_halves(raw.z);
  uint group = row * (m.k / GROUP) + i8 / (GROUP / 8u);
  f16vec2 s = f16vec2(FORMAT == INT4M || (group & 1u) == 0u ? pair.x : pair.y);
  f16vec2 offset = f16vec2(FORMAT == INT4M ? pair.y : float16_t(0.0));
  uvec4 q;
  if (FORMAT == INT8) {
    uvec2 w = raw.xy ^ 0x80808080u;
    // Bytes 0, 1 and 2, 3 of each word, apart by sixteen bits.
    q = uvec4(w.x & 0xffu | (w.x & 0xff00u) << 8, (w.x >> 16) & 0xffu | (w.x >> 8) & 0xff0000u,
              w.y & 0xffu | (w.y & 0xff00u) << 8, (w.y >> 16) & 0xffu | (w.y >> 8) & 0xff0000u);
  } else {
    uvec4 w = uvec4(raw.x, raw.x >> 8, raw.x >> 16, raw.x >> 24);
    q = w & 0xfu | (w & 0xf0u) << 12;
  }
  q |= 0x64006400u;
  f16vec2 zero = f16vec2(FORMAT == INT8 ? 1152.0 : FORMAT == INT4 ? 1032.0 : 1024.0);
  [[unroll]] for (uint i = 0u; i < 4u; ++i) {
    q[i] = packFloat2x16(fma(two_halves(q[i]) - zero, s, offset));
  }
  return q;
}
#endif

#endif
