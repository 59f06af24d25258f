// The sums of kernels for few rows on GPUs: LANES threads share OUTS weight rows and stride through
// their weights, so that a row of x is loaded once for all of them; the threads' sums join in a fixed
// tree. With STAGED (one row of x), a piece of x goes through shared memory, where lanes find it side by
// side: a lane's chunk of x is 64 bytes, so that loads of it from memory touch many lines. With NORM, x is taken times the norm's weight, and the squares of x are summed on the way: the
// norm's factor comes out with the sums.
#ifndef HORNITO_GEMV
#define HORNITO_GEMV

#include "weights.glsl"

layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint WIDE = 1u;
layout(constant_id = 5) const uint LANES = 32u;
layout(constant_id = 11) const uint OUTS = 1u;
layout(constant_id = 10) const uint NORM = 0u;

#ifdef WEIGHT_Q
layout(constant_id = 12) const uint STAGED = 0u;
const uint VECTORS = 4u;  // of x, for a chunk of weights
#else
const uint STAGED = 0u;
const uint VECTORS = 2u;
#endif

// Every thread's sums of one row of x, and of its squares: [weight row, or 4][thread].
shared float tree[128 * 5];

#ifdef WEIGHT_Q
// A piece of x: vector e of chunk c at [e * STAGE_PITCH + c]; the pitch keeps banks apart.
const uint STAGE_PITCH = 66u;
shared vec4 stage[4 * 66];
#endif

// A chunk of a row's weights as it lies in memory: sixteen of them where weights are quantised, eight
// elsewhere. `more` is used where a chunk is 32 bytes.
void load_chunk(Matrix m, uint row, uint i, out uvec4 raw, out uvec4 more, out vec2 scale) {
  more = uvec4(0u);
  scale = vec2(1.0, 0.0);
#if defined(WEIGHT_F16)
  raw = load_words4(m.at, row * (m.k / 8u) + i);
#elif defined(WEIGHT_Q)
  uint at = row * (m.k / 16u) + i;
  if (FORMAT == BF16) {
    raw = load_words4(m.at, 2u * at);
    more = load_words4(m.at, 2u * at + 1u);
    return;
  }
  scale = load_scale(m, row, 2u * i);
  if (FORMAT == INT8) {
    raw = load_words4(m.at, at);
    return;
  }
  raw = uvec4(load_words2(m.at, at), 0u, 0u);
  if (has_high_bits()) {
    raw.z = load_high_bits(m, 2u * at);
    raw.w = load_high_bits(m, 2u * at + 1u);
  }
#else
  uint at = 2u * (row * (m.k / 8u) + i);
  raw = load_words4(m.at, at);
  more = load_words4(m.at, at + 1u);
#endif
}

vec4 bf16_floats(uint x, uint y) {
  return uintBitsToFloat(uvec4(x << 16, x & 0xffff0000u, y << 16, y & 0xffff0000u));
}

// Its numbers. Of quantised weights the integers: those of int8, with 128 added, and of int4 in units of
// 1 / chunk_places().
void decode_chunk(uvec4 raw, uvec4 more, out vec4 q[VECTORS]) {
#if defined(WEIGHT_F16)
  q[0] = vec4(unpackHalf2x16(raw.x), unpackHalf2x16(raw.y));
  q[1] = vec4(unpackHalf2x16(raw.z), unpackHalf2x16(raw.w));
#elif defined(WEIGHT_Q)
  if (FORMAT == BF16) {
    q[0] = bf16_floats(raw.x, raw.y);
    q[1] = bf16_floats(raw.z, raw.w);
    q[2] = bf16_floats(more.x, more.y);
    q[3] = bf16_floats(more.z, more.w);
  } else if (FORMAT == INT8) {
    [[unroll]] for (uint v = 0u; v < 4u; ++v) {
      uint w = raw[v] ^ 0x80808080u;
      q[v] = vec4(ivec4(uvec4(w, w, w >> 16, w >> 16) & uvec4(0xffu, 0xff00u, 0xffu, 0xff00u)));
    }
  } else if (FORMAT == INT4 || FORMAT == INT4M) {
    [[unroll]] for (uint v = 0u; v < 2u; ++v) {
      const uvec4 place = uvec4(0xfu, 0xf0u, 0xf00u, 0xf000u);
      q[2u * v] = vec4(ivec4(uvec4(raw[v]) & place));
      q[2u * v + 1u] = vec4(ivec4(uvec4(raw[v] >> 16) & place));
    }
  } else {
    [[unroll]] for (uint v = 0u; v < 2u; ++v) {
      uvec4 x, y;
      nibbles(raw[v], x, y);
      if (has_high_bits()) add_high_bits(raw[2u + v], x, y);
      q[2u * v] = vec4(ivec4(x));
      q[2u * v + 1u] = vec4(ivec4(y));
    }
  }
#else
  q[0] = uintBitsToFloat(raw);
  q[1] = uintBitsToFloat(more);
#endif
}

#ifdef WEIGHT_Q
// One over the units that decode_chunk counts in: powers of two, so x takes them exactly.
vec4 chunk_places() {
  if (FORMAT == INT8) return vec4(1.0, 1.0 / 256.0, 1.0, 1.0 / 256.0);
  bool in_word = FORMAT == INT4 || FORMAT == INT4M;
  return in_word ? vec4(1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0 / 4096.0) : vec4(1.0);
}
#endif

// [row of x * 4 + weight row], and [row of x]; of this thread.
float sum[16];
float square[4];

#ifdef WEIGHT_Q
// Brings `count` chunks of row r of x, from chunk c0 on, to shared memory, times the norm's weight. Every
// thread must call it.
void stage_x(Floats x, Floats norm, uint k, uint r, uint c0, uint count) {
  uint end = min(4u * count, k / 4u - 4u * c0);
  barrier();
  for (uint f = gl_LocalInvocationID.x; f < end; f += 128u) {
    vec4 v = load_float4(x, r * (k / 4u) + 4u * c0 + f);
    if (NORM == 1u) {
      square[0] += dot(v, v);
      v *= load_float4(norm, 4u * c0 + f);
    }
    stage[f % 4u * STAGE_PITCH + f / 4u] = v;
  }
  barrier();
}
#endif

// Adds up this thread's part of the sums of the weight rows `weight[0 .. OUTS)` with ROWS rows of x from
// row0 on.
void sum_rows(Floats x, Floats norm, Matrix m, uint row0, uint weight[4]) {
  uint lane = gl_LocalInvocationID.x % LANES;
  [[unroll]] for (uint i = 0u; i < 16u; ++i) sum[i] = 0.0;
  [[unroll]] for (uint i = 0u; i < 4u; ++i) square[i] = 0.0;
  if (WIDE == 1u) {
    uint chunks = m.k / (4u * VECTORS);
    // Several strides of weights are on their way before the first is used.
    const uint DEEP = STAGED == 1u ? min(8u / OUTS, 64u / LANES) : OUTS == 4u ? 2u : 4u;
    for (uint c0 = 0u; c0 < chunks; c0 += DEEP * LANES) {
      uint i0 = c0 + lane;
      uvec4 raw[8];
      uvec4 more[8];
      vec2 scale[8];
      [[unroll]] for (uint j = 0u; j < DEEP * OUTS; ++j) {
        uint i = min(i0 + j / OUTS * LANES, chunks - 1u);
        load_chunk(m, weight[j % OUTS], i, raw[j], more[j], scale[j]);
      }
#ifdef WEIGHT_Q
      if (STAGED == 1u) stage_x(x, norm, m.k, row0, c0, DEEP * LANES);
#endif
      [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
        uint i = i0 + u * LANES;
        if (i >= chunks) break;
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
          vec4 v[VECTORS];
          float all = 0.0;
          [[unroll]] for (uint e = 0u; e < VECTORS; ++e) {
#ifdef WEIGHT_Q
            if (STAGED == 1u) v[e] = stage[e * STAGE_PITCH + i - c0];
#endif
            if (STAGED == 0u) {
              v[e] = load_float4(x, (row0 + r) * (m.k / 4u) + i * VECTORS + e);
              if (NORM == 1u) {
                square[r] += dot(v[e], v[e]);
                v[e] *= load_float4(norm, i * VECTORS + e);
              }
            }
#ifdef WEIGHT_Q
            all += (v[e].x + v[e].y) + (v[e].z + v[e].w);
            v[e] *= chunk_places();
#endif
          }
          [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
            vec4 q[VECTORS];
            decode_chunk(raw[u * OUTS + o], more[u * OUTS + o], q);
            float dots = dot(q[0], v[0]);
            [[unroll]] for (uint e = 1u; e < VECTORS; ++e) dots += dot(q[e], v[e]);
#ifdef WEIGHT_Q
            // The integers of int8 have 128 added to them.
            vec2 s = scale[u * OUTS + o];
            if (FORMAT == INT8) s.y = -128.0 * s.x;
            dots = dots * s.x + all * s.y;
#endif
            sum[r * 4u + o] += dots;
          }
        }
      }
    }
#ifdef WEIGHT_Q
    // Outliers of the rows, eight at a time.
    for (uint i = lane; i < OUTLIERS / 8u; i += LANES) {
      vec4 a[4], b[4];
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) load_outliers8(m, weight[o], i, a[o], b[o]);
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        vec4 v, w;
        load_x8(m, x, row0 + r, m.k / 8u + i, v, w);
        if (NORM == 1u) {
          [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            v[e] *= load_float(norm, x_column(m, m.k + 8u * i + e));
            w[e] *= load_float(norm, x_column(m, m.k + 8u * i + 4u + e));
          }
        }
        [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
          sum[r * 4u + o] += dot(a[o], v) + dot(b[o], w);
        }
      }
    }
#endif
  } else {
    for (uint i = lane; i < m.k; i += LANES) {
      float w[4];
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) w[o] = load_weight(m, weight[o], i);
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        float v = load_float(x, (row0 + r) * m.k + i);
        if (NORM == 1u) {
          square[r] += v * v;
          v *= load_float(norm, i);
        }
        [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[r * 4u + o] += w[o] * v;
      }
    }
  }
}

// Threads that a square of x is added up over: all, where each loads another part of a row.
const uint SQUARE_LANES = STAGED == 1u ? 128u : LANES;

// Joins the threads' sums of row r of x. Every thread of the workgroup must call it; the sums are then
// at tree[o * 128 + first thread of the lanes].
void join_row(uint r) {
  uint t = gl_LocalInvocationID.x;
  barrier();
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) tree[o * 128u + t] = sum[r * 4u + o];
  if (NORM == 1u) tree[512u + t] = square[r];
  for (uint w = (NORM == 1u ? SQUARE_LANES : LANES) / 2u; w > 0u; w >>= 1) {
    barrier();
    if (w < LANES && t % LANES < w) {
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) tree[o * 128u + t] += tree[o * 128u + t + w];
    }
    if (NORM == 1u && t % SQUARE_LANES < w) tree[512u + t] += tree[512u + t + w];
  }
  barrier();
}

// The factor of the row that was joined, of the lanes that begin at thread `first`.
float norm_factor(uint first, uint k, float eps) {
  uint at = STAGED == 1u ? 512u : 512u + first;
  return NORM == 1u ? inversesqrt(tree[at] / float(k) + eps) : 1.0;
}

#endif
