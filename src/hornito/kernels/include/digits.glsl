// Sums of one row of x with weights of 4 or 8 bits, by integer dot products: x goes through shared memory
// as fixed-point numbers of DIGITS signed bytes with a scale for every 32 columns; three of them keep it
// to 2^-24 of the greatest column, as fp32 would. LANES threads share two weight rows, and a workgroup
// walks over tiles of such groups. The loops stay small: straight code that runs once costs more to bring
// than it saves (docs/architecture.md). Needs rows of whole chunks of 32 columns and groups of at least
// as many. With SPLITS, a workgroup sums a part of K alone (z).
#ifndef HORNITO_DIGITS
#define HORNITO_DIGITS

#extension GL_EXT_spirv_intrinsics : require
#extension GL_KHR_shader_subgroup_shuffle : require

#include "normed.glsl"
#include "threads.glsl"
#include "weights.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 5) const uint LANES = 32u;    // of a subgroup, at least 4
layout(constant_id = 12) const uint SPLITS = 1u;   // 1 with NORM
layout(constant_id = 13) const uint CHUNKS = 1u;   // of 32 columns, K / 32
layout(constant_id = 14) const uint DIGITS = 3u;

const uint THREADS = 256u;
const uint GROUPS = THREADS / LANES;

// The dot product of four signed bytes with four others; `packed` is 0.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_bytes(uint a, uint b, spirv_literal int packed);

// Chunks of a part of K.
const uint PART = (CHUNKS + SPLITS - 1u) / SPLITS;

// No more shared memory than the product takes: a GPU that gives a workgroup 32 KiB may run one of them
// at a time. The digits of a chunk, the highest first, 32 bytes of each: vector e of chunk c at
// [e * PART + c]. Those of 4-bit weights lie as nibbles do: of eight columns the even, then the odd.
shared uvec4 digits[2u * DIGITS * PART];
// Of a chunk: scale and sum.
shared vec2 chunk_scale[PART];
shared float outlier_x[OUTLIERS + 1u];
shared float squares[THREADS / 4u];  // of a subgroup
// The sums of the groups of two tiles, in turn: a thread is one tile ahead of another at most.
shared vec2 group_sums[2u * GROUPS];

// Of the kernel: the two weight rows of a group, and what becomes of a tile, whose sums are at
// group_sums[at] to [at + GROUPS - 1] then. Every thread calls both.
uvec2 group_rows(uint group);
void tile_end(uint tile, uint at);

// Four numbers of DIGITS digits, as a word of each digit; x has the lowest.
uvec3 split(ivec4 q) {
  uvec4 t = DIGITS == 3u ? uvec4(q + 0x8080) ^ 0x8080u : uvec4(q + 0x80) ^ 0x80u;
  uvec3 words = uvec3(0u);
  [[unroll]] for (uint i = 0u; i < 4u; ++i) {
    words |= uvec3(t[i] & 255u, t[i] >> 8 & 255u, t[i] >> 16 & 255u) << (8u * i);
  }
  return words;
}

// The greatest of four neighbouring threads, and their sum.
float greatest_of_four(float v) {
  v = max(v, subgroupShuffleXor(v, 1u));
  return max(v, subgroupShuffleXor(v, 2u));
}
float sum_of_four(float v) {
  v += subgroupShuffleXor(v, 1u);
  return v + subgroupShuffleXor(v, 2u);
}

// Brings the eight columns of unit i of `count` chunks from c0 on to shared memory; returns the sum of
// their squares. Four threads in a row have the units of a chunk.
float stage_unit(Floats x, Floats norm, uint c0, uint count, uint i) {
  // Below what digits of 127 are, 8355711 and 32639: the quotients are rounded.
  const float MOST = DIGITS == 3u ? 8355000.0 : 32600.0;
  uint at = 2u * (4u * c0 + min(i, 4u * count - 1u));
  vec4 a = load_value4(x, at);
  vec4 b = load_value4(x, at + 1u);
  float own = dot(a, a) + dot(b, b);
  if (NORM == 1u) {
    a *= load_float4(norm, at);
    b *= load_float4(norm, at + 1u);
  }
  vec4 m = max(abs(a), abs(b));
  float most = greatest_of_four(max(max(m.x, m.y), max(m.z, m.w)));
  float all = sum_of_four(((a.x + b.x) + (a.y + b.y)) + ((a.z + b.z) + (a.w + b.w)));
  if (i >= 4u * count) return 0.0;
  // Below this the products are nothing, and their inverse would be too large.
  float inverse = most > 1e-30 ? MOST / most : 0.0;
  if (FORMAT != INT8) {
    vec4 even = vec4(a.x, a.z, b.x, b.z);
    b = vec4(a.y, a.w, b.y, b.w);
    a = even;
  }
  uvec3 first = split(ivec4(roundEven(a * inverse)));
  uvec3 second = split(ivec4(roundEven(b * inverse)));
  uint c = i / 4u;
  uint word = i % 2u * 2u;
  [[unroll]] for (uint d = 0u; d < DIGITS; ++d) {
    uint vector = (2u * d + i % 4u / 2u) * PART + c;
    digits[vector][word] = first[DIGITS - 1u - d];
    digits[vector][word + 1u] = second[DIGITS - 1u - d];
  }
  // What is not finite is no number of digits: the scale says so.
  bool finite = (floatBitsToUint(all) & 0x7f800000u) != 0x7f800000u;
  if (i % 4u == 0u) chunk_scale[c] = vec2(finite ? most / MOST : all, all);
  return own;
}

// Brings `count` chunks of x from c0 on to shared memory, and what outliers are multiplied with. Every
// thread must call it; returns the norm's factor, or 1.
float stage(Floats x, Floats norm, Matrix m, uint c0, uint count, float eps) {
  uint t = thread();
  uint column = OUTLIERS > 0u ? load_outlier_column(m, min(t, OUTLIERS - 1u)) : 0u;
  float own = 0.0;
  // Whole subgroups take part.
  uint units = (4u * count + gl_SubgroupSize - 1u) / gl_SubgroupSize * gl_SubgroupSize;
  [[dont_unroll]] for (uint i = t; i < units; i += THREADS) {
    own += stage_unit(x, norm, c0, count, i);
  }
  if (t < OUTLIERS) outlier_x[t] = x_at(x, norm, 0u, column);
  for (uint i = t + THREADS; i < OUTLIERS; i += THREADS) {
    outlier_x[i] = x_at(x, norm, 0u, load_outlier_column(m, i));
  }
  if (NORM == 1u) {
    for (uint w = gl_SubgroupSize / 2u; w > 0u; w >>= 1) own += subgroupShuffleXor(own, w);
    if (gl_SubgroupInvocationID == 0u) squares[gl_SubgroupID] = own;
  }
  barrier();
  if (NORM == 0u) return 1.0;
  float all = 0.0;
  for (uint i = 0u; i < gl_NumSubgroups; ++i) all += squares[i];
  return inversesqrt(all / float(32u * CHUNKS) + eps);
}

// A chunk of a weight row as it lies in memory; `more` is used where it is 32 bytes. Bit 0 of `group` says
// that the scale is in the upper half of its word.
struct Chunk {
  uvec4 raw;
  uvec4 more;
  uint scale;
  uint group;
};

Chunk load_chunk(Matrix m, uint row, uint c) {
  Chunk chunk;
  uint at = row * CHUNKS + c;
  if (FORMAT == INT8) {
    chunk.raw = load_words4(m.at, 2u * at);
    chunk.more = load_words4(m.at, 2u * at + 1u);
  } else {
    chunk.raw = load_words4(m.at, at);
  }
  chunk.group = row * (32u * CHUNKS / GROUP) + c / (GROUP / 32u);
  chunk.scale = load_scale_word(m, chunk.group);
  return chunk;
}

// The product of a chunk of weights with chunk c of those in shared memory.
float multiply(Chunk chunk, uint c) {
  ivec3 dots = ivec3(0);
  [[unroll]] for (uint e = 0u; e < 2u; ++e) {
    [[unroll]] for (uint d = 0u; d < DIGITS; ++d) {
      uvec4 x = digits[(2u * d + e) * PART + c];
      [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        uint w;
        if (FORMAT == INT8) {
          w = e == 0u ? chunk.raw[i] : chunk.more[i];
        } else {
          w = chunk.raw[2u * e + i / 2u] >> (4u * (i % 2u)) & 0x0f0f0f0fu;
        }
        dots[d] += dot_bytes(w, x[i], 0);
      }
    }
  }
  vec2 of_x = chunk_scale[c];
  vec2 scale = plain_scale(chunk.scale, chunk.group & 1u);
  // Two digits of 32 columns fit 32 bits.
  float all = DIGITS == 3u
      ? fma(float(dots.x), 65536.0, float(dots.y * 256 + dots.z))
      : float(dots.x * 256 + dots.y);
  return fma(all * of_x.x, scale.x, of_x.y * scale.y);
}

// Two outliers of both weight rows.
uvec2 load_pairs(Matrix m, uvec2 rows, uint pair) {
  return uvec2(load_outliers2(m, rows.x, pair), load_outliers2(m, rows.y, pair));
}

// Sums tiles 0 to tiles - 1 of groups, every gl_NumWorkGroups.x-th of them here, and ends each.
void run_tiles(Floats x, Floats norm, Matrix m, uint tiles, float eps) {
  uint t = thread();
  uint lane = t % LANES;
  uint c0 = gl_WorkGroupID.z * PART;
  uint count = min(PART, CHUNKS - c0);
  float factor = stage(x, norm, m, c0, count, eps);
  uint at = 0u;
  [[dont_unroll]] for (uint tile = gl_WorkGroupID.x; tile < tiles; tile += gl_NumWorkGroups.x) {
    uvec2 rows = group_rows(tile * GROUPS + t / LANES);
    uint pair = lane + gl_WorkGroupID.z * LANES;
    uvec2 outliers = pair < OUTLIERS / 2u ? load_pairs(m, rows, pair) : uvec2(0u);
    vec2 sum = vec2(0.0);
    [[dont_unroll]] for (uint c = lane; c < count; c += LANES) {
      Chunk first = load_chunk(m, rows.x, c0 + c);
      Chunk second = load_chunk(m, rows.y, c0 + c);
      sum += vec2(multiply(first, c), multiply(second, c));
    }
    while (pair < OUTLIERS / 2u) {
      vec2 v = vec2(outlier_x[2u * pair], outlier_x[2u * pair + 1u]);
      sum += vec2(dot(unpackHalf2x16(outliers.x), v), dot(unpackHalf2x16(outliers.y), v));
      pair += SPLITS * LANES;
      if (pair < OUTLIERS / 2u) outliers = load_pairs(m, rows, pair);
    }
    [[unroll]] for (uint w = LANES / 2u; w > 0u; w >>= 1) {
      sum += vec2(subgroupShuffleXor(sum.x, w), subgroupShuffleXor(sum.y, w));
    }
    if (lane == 0u) group_sums[at + t / LANES] = sum * factor;
    barrier();
    tile_end(tile, at);
    at = GROUPS - at;
  }
}

#endif
