// The sums of gemv.glsl for one row of x and weights of 4 or 8 bits, by integer dot products: x goes
// through shared memory as fixed-point numbers of three signed bytes with a scale for every 32 columns,
// which keeps it to 2^-24 of the greatest of them, as fp32 would. Needs rows of whole chunks of 32 columns
// and groups of at least as many.
#ifndef HORNITO_GEMV_DIGITS
#define HORNITO_GEMV_DIGITS

#extension GL_EXT_spirv_intrinsics : require

// Chunks of x that lie in shared memory at a time; a multiple of DEEP * LANES.
const uint PIECE = 128u;

// The dot product of four signed bytes with four others; `packed` is 0.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_bytes(uint a, uint b, spirv_literal int packed);

// The digits of a chunk, the highest first, 32 bytes of each: vector e of six of chunk c at
// [e * PIECE + c]. Those of 4-bit weights lie as nibbles do: of eight columns the even, then the odd.
shared uvec4 digits[6u * PIECE];
// Of eight columns each: greatest magnitude and sum; of a chunk: scale and sum.
shared vec4 greatest[PIECE];
shared vec4 total[PIECE];
shared vec2 chunk_scale[PIECE];

const float MOST = 8355000.0;  // three digits of 127 are 8355711; the quotients are rounded
const uint DEEP = OUTS >= 8u ? 1u : 2u;

// Threads that have squares of different parts of a row.
const uint SQUARE_LANES = 128u;

// Eight columns of x from 8 * i8 on, times the norm's weight; returns the sum of their own squares.
float load_columns(Floats x, Floats norm, uint i8, out vec4 a, out vec4 b) {
  a = load_float4(x, 2u * i8);
  b = load_float4(x, 2u * i8 + 1u);
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

// Brings chunks c0 to c0 + count - 1 of x to shared memory. Every thread must call it.
void stage_digits(Floats x, Floats norm, uint c0, uint count) {
  barrier();
  for (uint i = gl_LocalInvocationID.x; i < 4u * count; i += 128u) {
    vec4 a, b;
    square[0] += load_columns(x, norm, 4u * c0 + i, a, b);
    vec4 m = max(abs(a), abs(b));
    greatest[i / 4u][i % 4u] = max(max(m.x, m.y), max(m.z, m.w));
    total[i / 4u][i % 4u] = ((a.x + b.x) + (a.y + b.y)) + ((a.z + b.z) + (a.w + b.w));
  }
  barrier();
  for (uint i = gl_LocalInvocationID.x; i < 4u * count; i += 128u) {
    uint c = i / 4u;
    vec4 m = greatest[c];
    float most = max(max(m.x, m.y), max(m.z, m.w));
    // Below this the products are nothing, and their inverse would be too large.
    float inverse = most > 1e-30 ? MOST / most : 0.0;
    vec4 a, b;
    load_columns(x, norm, 4u * c0 + i, a, b);
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
      vec4 t = total[c];
      float all = (t.x + t.y) + (t.z + t.w);
      // What is not finite is no number of digits: the scale says so.
      bool finite = (floatBitsToUint(all) & 0x7f800000u) != 0x7f800000u;
      chunk_scale[c] = vec2(finite ? most / MOST : all, all);
    }
  }
  barrier();
}

// A chunk of a row's weights as it lies in memory; `more` is used where that is 32 bytes.
void load_chunk32(Matrix m, uint row, uint c, out uvec4 raw, out uvec4 more, out vec2 scale) {
  uint at = row * (m.k / 32u) + c;
  scale = load_scale(m, row, 4u * c);
  if (FORMAT == INT8) {
    raw = load_words4(m.at, 2u * at);
    more = load_words4(m.at, 2u * at + 1u);
  } else {
    raw = load_words4(m.at, at);
    more = uvec4(0u);
  }
}

// Its product with chunk `c` of the piece, whose digits are `x`.
float dot_chunk(uvec4 raw, uvec4 more, uvec4 x[6], vec2 x_scale, vec2 scale) {
  ivec3 dots = ivec3(0);
  [[unroll]] for (uint i = 0u; i < 8u; ++i) {
    uint w;
    if (FORMAT == INT8) {
      w = i < 4u ? raw[i % 4u] : more[i % 4u];
    } else {
      w = raw[i / 2u] >> (4u * (i % 2u)) & 0x0f0f0f0fu;
    }
    [[unroll]] for (uint d = 0u; d < 3u; ++d) {
      dots[d] += dot_bytes(w, x[2u * d + i / 4u][i % 4u], 0);
    }
  }
  float sum = fma(float(dots.x), 65536.0, fma(float(dots.y), 256.0, float(dots.z)));
  return fma(sum * x_scale.x, scale.x, x_scale.y * scale.y);
}

void sum_chunks(Floats x, Floats norm, Matrix m, uint row0, uint weight[8]) {
  uint lane = gl_LocalInvocationID.x % LANES;
  uint chunks = m.k / 32u;
  for (uint c0 = 0u; c0 < chunks; c0 += DEEP * LANES) {
    uvec4 raw[8];
    uvec4 more[8];
    vec2 scale[8];
    [[unroll]] for (uint j = 0u; j < DEEP * OUTS; ++j) {
      uint c = min(c0 + lane + j / OUTS * LANES, chunks - 1u);
      load_chunk32(m, weight[j % OUTS], c, raw[j], more[j], scale[j]);
    }
    // Behind the loads of weights, which take longer.
    if (c0 % PIECE == 0u) stage_digits(x, norm, c0, min(PIECE, chunks - c0));
    [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
      uint c = c0 + lane + u * LANES;
      if (c >= chunks) break;
      c %= PIECE;
      uvec4 d[6];
      [[unroll]] for (uint e = 0u; e < 6u; ++e) d[e] = digits[e * PIECE + c];
      vec2 x_scale = chunk_scale[c];
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
        uint j = u * OUTS + o;
        sum[o] += dot_chunk(raw[j], more[j], d, x_scale, scale[j]);
      }
    }
  }
}

#endif
