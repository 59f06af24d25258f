// Quantised matrices, and bf16, for the kernels' q variants. FORMAT, GROUP and OUTLIERS (weights.glsl)
// are specialised, so that one SPIR-V file serves every format and the driver keeps the code of one.
//
// A matrix [rows, k] lies in planes, each a whole number of 16-byte words (docs/format.md). Weight i of
// a row is load_quants8's number times x plus y of load_scale; a scale counts for GROUP weights.
#ifndef HORNITO_QUANTS
#define HORNITO_QUANTS

#include "memory.glsl"

layout(constant_id = 7) const uint FORMAT = 1u;
layout(constant_id = 8) const uint GROUP = 32u;
layout(constant_id = 9) const uint OUTLIERS = 0u;

const uint BF16 = 1u;
const uint INT8 = 2u;
const uint INT4 = 3u;
const uint INT4M = 4u;
const uint Q5 = 5u;
const uint Q5M = 6u;
const uint Q4K = 7u;
const uint Q5K = 8u;
const uint Q6K = 9u;

// Words of a plane that has `bytes` for every `block` weights.
uint plane_words(Matrix m, uint block, uint bytes) {
  return (m.rows * (m.k / block) * bytes + 15u) / 16u * 4u;
}

// Half i of a plane that begins at word `base`.
float plane_half(Matrix m, uint base, uint i) {
  return unpackHalf2x16(load_word(m.at, base + (i >> 1)) >> (16u * (i & 1u))).x;
}

// Byte i of a word.
uint byte_of(uint word, uint i) { return (word >> (8u * i)) & 255u; }

uint body_words(Matrix m) { return plane_words(m, GROUP, FORMAT == INT8 ? GROUP : GROUP / 2u); }

// Words of the plane of higher bits, behind the body.
uint high_words(Matrix m) {
  if (FORMAT == Q5 || FORMAT == Q5M || FORMAT == Q5K) return plane_words(m, 32u, 4u);
  return FORMAT == Q6K ? plane_words(m, 256u, 64u) : 0u;
}

// Puts the high bits of eight weights, at the low end of a word, onto their low ones.
void add_high_bits(uint bits, inout uvec4 x, inout uvec4 y) {
  if (FORMAT == Q6K) {
    x |= ((uvec4(bits) >> uvec4(0u, 2u, 4u, 6u)) & 3u) << 4;
    y |= ((uvec4(bits) >> uvec4(8u, 10u, 12u, 14u)) & 3u) << 4;
  } else {
    x |= ((uvec4(bits) >> uvec4(0u, 1u, 2u, 3u)) & 1u) << 4;
    y |= ((uvec4(bits) >> uvec4(4u, 5u, 6u, 7u)) & 1u) << 4;
  }
}

bool has_high_bits() {
  return FORMAT == Q6K || FORMAT == Q5 || FORMAT == Q5M || FORMAT == Q5K;
}

// The high bits of eight weights from 8 * at on, at the low end of a word.
uint load_high_bits(Matrix m, uint at) {
  uint base = body_words(m);
  if (FORMAT == Q6K) return load_word(m.at, base + (at >> 1)) >> (16u * (at & 1u));
  return load_word(m.at, base + (at >> 2)) >> (8u * (at & 3u));
}

vec4 signed_bytes(uint w) { return vec4((ivec4(int(w)) << ivec4(24, 16, 8, 0)) >> 24); }

void nibbles(uint w, out uvec4 x, out uvec4 y) {
  x = (uvec4(w) >> uvec4(0u, 4u, 8u, 12u)) & 15u;
  y = (uvec4(w) >> uvec4(16u, 20u, 24u, 28u)) & 15u;
}

// The integers of eight weights from 8 * i8 on; bf16 has its numbers themselves.
void load_quants8(Matrix m, uint row, uint i8, out vec4 a, out vec4 b) {
  uint at = row * (m.k / 8u) + i8;
  if (FORMAT == BF16) {
    uvec4 q = load_words4(m.at, at);
    a = uintBitsToFloat(uvec4(q.x << 16, q.x & 0xffff0000u, q.y << 16, q.y & 0xffff0000u));
    b = uintBitsToFloat(uvec4(q.z << 16, q.z & 0xffff0000u, q.w << 16, q.w & 0xffff0000u));
  } else if (FORMAT == INT8) {
    uvec2 q = load_words2(m.at, at);
    a = signed_bytes(q.x);
    b = signed_bytes(q.y);
  } else {
    uvec4 x, y;
    nibbles(load_word(m.at, at), x, y);
    if (has_high_bits()) add_high_bits(load_high_bits(m, at), x, y);
    a = vec4(ivec4(x));
    b = vec4(ivec4(y));
  }
}

// Formats whose scale lies in one word: int8, int4, int4m.
bool has_plain_scale() { return FORMAT == INT8 || FORMAT == INT4 || FORMAT == INT4M; }

// That word of group `group`, and the scale that it has: what a number is multiplied with, and what is
// added; `odd` is the group's lowest bit.
uint load_scale_word(Matrix m, uint group) {
  return load_word(m.at, body_words(m) + (FORMAT == INT4M ? group : group >> 1));
}
vec2 plain_scale(uint word, uint odd) {
  if (FORMAT == INT4M) return unpackHalf2x16(word);
  float step = unpackHalf2x16(word >> (16u * odd)).x;
  return vec2(step, FORMAT == INT4 ? -8.0 * step : 0.0);
}

// What the number of weight 8 * i8 is multiplied with, and what is added.
vec2 load_scale(Matrix m, uint row, uint i8) {
  if (FORMAT == BF16) return vec2(1.0, 0.0);
  uint group = row * (m.k / GROUP) + i8 / (GROUP / 8u);
  if (has_plain_scale()) return plain_scale(load_scale_word(m, group), group & 1u);
  uint base = body_words(m) + high_words(m);
  if (FORMAT == Q5M) return unpackHalf2x16(load_word(m.at, base + group));
  if (FORMAT == Q4K || FORMAT == Q5K) {
    uvec4 meta = load_words4(m.at, (base >> 2) + (group >> 3));
    uint i = group & 3u;
    uint s = byte_of(meta.y, i);
    uint low = byte_of(meta.z, i);
    if ((group & 4u) == 0u) {
      s &= 63u;
      low &= 63u;
    } else {
      uint last = byte_of(meta.w, i);
      s = (last & 15u) | ((s >> 2) & 48u);
      low = (last >> 4) | ((low >> 2) & 48u);
    }
    return unpackHalf2x16(meta.x) * vec2(float(s), -float(low));
  }
  if (FORMAT == Q6K) {
    int s = int(load_word(m.at, base + (group >> 2)) << (24u - 8u * (group & 3u))) >> 24;
    float step = plane_half(m, base + plane_words(m, 256u, 16u), group >> 4) * float(s);
    return vec2(step, -32.0 * step);
  }
  float step = plane_half(m, base, group);
  return vec2(step, -16.0 * step);
}

// Where the outliers lie, in words: fp16 [rows, OUTLIERS], and behind it the column of each. Formats
// that have outliers are int8, int4 and int4m.
uint outliers_at(Matrix m) {
  return body_words(m) + plane_words(m, GROUP, FORMAT == INT4M ? 4u : 2u);
}

// Eight outliers of a row, from 8 * i8 on.
void load_outliers8(Matrix m, uint row, uint i8, out vec4 a, out vec4 b) {
  unpack8(load_words4(m.at, outliers_at(m) / 4u + row * (OUTLIERS / 8u) + i8), a, b);
}

// Two outliers of a row from 2 * i2 on, as a word, and the columns of x that they are multiplied with.
uint load_outliers2(Matrix m, uint row, uint i2) {
  return load_word(m.at, outliers_at(m) + row * (OUTLIERS / 2u) + i2);
}
uvec2 load_outlier_columns2(Matrix m, uint i2) {
  return load_words2(m.at, (outliers_at(m) + m.rows * (OUTLIERS / 2u)) / 2u + i2);
}

// The column of x that outlier i is multiplied with.
uint load_outlier_column(Matrix m, uint i) {
  return load_word(m.at, outliers_at(m) + m.rows * (OUTLIERS / 8u) * 4u + i);
}

#endif
