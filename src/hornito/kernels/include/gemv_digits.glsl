// The sums of gemv.glsl for one row of x and weights of 4 or 8 bits, by integer dot products: x goes
// through shared memory as fixed-point numbers of three signed bytes with a scale for every 32 columns,
// which keeps it to 2^-24 of the greatest of them, as fp32 would. A workgroup brings x there once and
// walks over tiles of weight rows, with the next weights on their way while it multiplies. Needs rows of
// whole chunks of 32 columns and groups of at least as many. With SPLITS, a workgroup sums a part of K
// alone (z); a part has at most PIECE chunks.
#ifndef HORNITO_GEMV_DIGITS
#define HORNITO_GEMV_DIGITS

#extension GL_EXT_spirv_intrinsics : require

layout(constant_id = 12) const uint SPLITS = 1u;
// Times eight columns of x that a thread brings to shared memory, at most 7.
layout(constant_id = 13) const uint UNITS = 1u;

// The dot product of four signed bytes with four others; `packed` is 0.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_bytes(uint a, uint b, spirv_literal int packed);

// Most chunks of x in shared memory.
const uint PIECE = 200u;

// The digits of a chunk, the highest first, 32 bytes of each: vector e of six of chunk c at
// [e * PIECE + c]. Those of 4-bit weights lie as nibbles do: of eight columns the even, then the odd.
shared uvec4 digits[6u * PIECE];
// Of eight columns each: greatest magnitude and sum; of a chunk: scale and sum.
shared vec4 greatest[PIECE];
shared vec4 total[PIECE];
shared vec2 chunk_scale[PIECE];

const float MOST = 8355000.0;  // three digits of 127 are 8355711; the quotients are rounded

// Eight columns of x from 8 * i8 on, times the norm's weight; returns the sum of their own squares.
float load_columns(Floats x, Floats norm, uint i8, out vec4 a, out vec4 b) {
  a = load_value4(x, 2u * i8);
  b = load_value4(x, 2u * i8 + 1u);
  if (NORM == 0u) return 0.0;
  float squares = dot(a, a) + dot(b, b);
  a *= load_float4(norm, 2u * i8);
  b *= load_float4(norm, 2u * i8 + 1u);
  return squares;
}

// Four numbers of three digits, as a word of each digit; x has the lowest.
uvec3 split(ivec4 q) {
  uvec4 t = uvec4(q + 0x8080) ^ 0x8080u;
  uvec3 words = uvec3(0u);
  [[unroll]] for (uint i = 0u; i < 4u; ++i) {
    words |= uvec3(t[i] & 255u, t[i] >> 8 & 255u, t[i] >> 16 & 255u) << (8u * i);
  }
  return words;
}

// Brings chunks c0 to c0 + count - 1 of x to shared memory, every load at once. Every thread must call it.
void stage_digits(Floats x, Floats norm, uint c0, uint count) {
  uint t = gl_LocalInvocationID.x;
  vec4 own[14];
  [[unroll]] for (uint u = 0u; u < UNITS; ++u) {
    uint i = min(t + 128u * u, 4u * count - 1u);
    float squares = load_columns(x, norm, 4u * c0 + i, own[2u * u], own[2u * u + 1u]);
    if (t + 128u * u < 4u * count) square[0] += squares;
  }
  [[unroll]] for (uint u = 0u; u < UNITS; ++u) {
    uint i = t + 128u * u;
    if (i >= 4u * count) continue;
    vec4 a = own[2u * u];
    vec4 b = own[2u * u + 1u];
    vec4 m = max(abs(a), abs(b));
    greatest[i / 4u][i % 4u] = max(max(m.x, m.y), max(m.z, m.w));
    total[i / 4u][i % 4u] = ((a.x + b.x) + (a.y + b.y)) + ((a.z + b.z) + (a.w + b.w));
  }
  if (NORM == 1u) {
    tree[SQUARES + t] = square[0];
    for (uint w = 128u; w > 1u;) {
      uint parts = min(w, 4u);
      w /= parts;
      barrier();
      if (t < w) join_parts(SQUARES + t, w, parts);
    }
  }
  barrier();
  [[unroll]] for (uint u = 0u; u < UNITS; ++u) {
    uint i = t + 128u * u;
    if (i >= 4u * count) continue;
    uint c = i / 4u;
    vec4 m = greatest[c];
    float most = max(max(m.x, m.y), max(m.z, m.w));
    // Below this the products are nothing, and their inverse would be too large.
    float inverse = most > 1e-30 ? MOST / most : 0.0;
    vec4 a = own[2u * u];
    vec4 b = own[2u * u + 1u];
    if (FORMAT != INT8) {
      vec4 even = vec4(a.x, a.z, b.x, b.z);
      b = vec4(a.y, a.w, b.y, b.w);
      a = even;
    }
    uvec3 first = split(ivec4(roundEven(a * inverse)));
    uvec3 second = split(ivec4(roundEven(b * inverse)));
    uint half_of = i % 4u / 2u;
    uint at = i % 2u * 2u;
    [[unroll]] for (uint d = 0u; d < 3u; ++d) {
      uint vector = (2u * d + half_of) * PIECE + c;
      digits[vector][at] = first[2u - d];
      digits[vector][at + 1u] = second[2u - d];
    }
    if (i % 4u == 0u) {
      vec4 s = total[c];
      float all = (s.x + s.y) + (s.z + s.w);
      // What is not finite is no number of digits: the scale says so.
      bool finite = (floatBitsToUint(all) & 0x7f800000u) != 0x7f800000u;
      chunk_scale[c] = vec2(finite ? most / MOST : all, all);
    }
  }
  barrier();
}

// Two chunks of each weight row on their way, as they lie in memory; `more` is used where one is 32 bytes.
// Bit o of `odd` says that row o's scale is in the upper half of its word.
uvec4 raw[2][8];
uvec4 more[2][8];
uint scales[2][8];
uint odd[2];

// Brings chunk c of the rows on its way, as number `to` of the two.
void fetch_chunk(uint to, Matrix m, uint rows[8], uint c) {
  odd[to] = 0u;
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
    uint at = rows[o] * (m.k / 32u) + c;
    if (FORMAT == INT8) {
      raw[to][o] = load_words4(m.at, 2u * at);
      more[to][o] = load_words4(m.at, 2u * at + 1u);
    } else {
      raw[to][o] = load_words4(m.at, at);
    }
    uint group = rows[o] * (m.k / GROUP) + c / (GROUP / 32u);
    scales[to][o] = load_scale_word(m, group);
    odd[to] |= (group & 1u) << o;
  }
}

// The product of row o's chunk number `from` with a chunk of x: its digits, and its scale and sum.
float dot_chunk(uint from, uint o, uvec4 x[6], vec2 x_scale) {
  ivec3 dots = ivec3(0);
  [[unroll]] for (uint i = 0u; i < 8u; ++i) {
    uint w;
    if (FORMAT == INT8) {
      w = i < 4u ? raw[from][o][i % 4u] : more[from][o][i % 4u];
    } else {
      w = raw[from][o][i / 2u] >> (4u * (i % 2u)) & 0x0f0f0f0fu;
    }
    [[unroll]] for (uint d = 0u; d < 3u; ++d) {
      dots[d] += dot_bytes(w, x[2u * d + i / 4u][i % 4u], 0);
    }
  }
  vec2 scale = plain_scale(scales[from][o], odd[from] >> o & 1u);
  float all = fma(float(dots.x), 65536.0, fma(float(dots.y), 256.0, float(dots.z)));
  return fma(all * x_scale.x, scale.x, x_scale.y * scale.y);
}

// Adds the products of chunk number `from` of each row, which is chunk c of those in shared memory.
void multiply_chunk(uint from, uint c, uint count) {
  if (c >= count) return;
  uvec4 x[6];
  [[unroll]] for (uint e = 0u; e < 6u; ++e) x[e] = digits[e * PIECE + c];
  vec2 x_scale = chunk_scale[c];
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[o] += dot_chunk(from, o, x, x_scale);
}

// Sums tiles 0 to tiles - 1 of weight rows, every gl_NumWorkGroups.x-th of them here, and ends each.
void run_tiles(Floats x, Floats norm, Matrix m, uint tiles) {
  uint lane = gl_LocalInvocationID.x % LANES;
  uint part = (m.k / 32u + SPLITS - 1u) / SPLITS;
  uint c0 = gl_WorkGroupID.z * part;
  uint count = min(part, m.k / 32u - c0);
  uint last = count - 1u;
  uint rows[8];
  uint next[8];
  uint tile = gl_WorkGroupID.x;
  tile_rows(tile, rows);
  fetch_chunk(0u, m, rows, c0 + min(lane, last));
  square[0] = 0.0;
  stage_digits(x, norm, c0, count);
  for (; tile < tiles; tile += gl_NumWorkGroups.x) {
    [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[o] = 0.0;
    uint pair = lane + gl_WorkGroupID.z * LANES;
    if (OUTLIERS > 0u) fetch_outliers(m, rows, pair);
    // Two turns of the lanes at a time, so that no register is copied while its load is on the way.
    for (uint s = 0u; s < count; s += 2u * LANES) {
      bool second = s + LANES < count;
      if (second) fetch_chunk(1u, m, rows, c0 + min(s + LANES + lane, last));
      multiply_chunk(0u, s + lane, count);
      if (s + 2u * LANES < count) {
        fetch_chunk(0u, m, rows, c0 + min(s + 2u * LANES + lane, last));
      } else if (tile + gl_NumWorkGroups.x < tiles) {
        tile_rows(tile + gl_NumWorkGroups.x, next);
        fetch_chunk(0u, m, next, c0 + min(lane, last));
      }
      if (second) multiply_chunk(1u, s + LANES + lane, count);
    }
    for (; pair < OUTLIERS / 2u; pair += SPLITS * LANES) {
      add_outliers(x, norm, m.k, 0u, 0u);
      fetch_outliers(m, rows, pair + SPLITS * LANES);
    }
    join_row(0u);
    tile_end(tile, 0u);
    [[unroll]] for (uint o = 0u; o < OUTS; ++o) rows[o] = next[o];
  }
}

#endif
