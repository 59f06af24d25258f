// The sums of gemv.glsl in floats, for every storage type.
#ifndef HORNITO_GEMV_FLOATS
#define HORNITO_GEMV_FLOATS

#ifdef WEIGHT_Q
const uint VECTORS = 4u;  // of x, for a chunk of weights
#else
const uint VECTORS = 2u;
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

// Integers below 2^23 as they are, without a conversion, which runs at an eighth of the speed of sums on
// some GPUs.
vec4 floats_of(uvec4 n) { return uintBitsToFloat(n | 0x4b000000u) - 8388608.0; }

// Its numbers. Of quantised weights the integers: those of int8, with 128 added, and of int4 in units of
// 1 / chunk_places().
void decode_chunk(uvec4 raw, uvec4 more, out vec4 q[VECTORS]) {
#if defined(WEIGHT_F16)
  unpack8(raw, q[0], q[1]);
#elif defined(WEIGHT_Q)
  if (FORMAT == BF16) {
    q[0] = bf16_floats(raw.x, raw.y);
    q[1] = bf16_floats(raw.z, raw.w);
    q[2] = bf16_floats(more.x, more.y);
    q[3] = bf16_floats(more.z, more.w);
  } else if (FORMAT == INT8) {
    [[unroll]] for (uint v = 0u; v < 4u; ++v) {
      uint w = raw[v] ^ 0x80808080u;
      q[v] = floats_of(uvec4(w, w, w >> 16, w >> 16) & uvec4(0xffu, 0xff00u, 0xffu, 0xff00u));
    }
  } else if (FORMAT == INT4 || FORMAT == INT4M) {
    [[unroll]] for (uint v = 0u; v < 2u; ++v) {
      const uvec4 place = uvec4(0xfu, 0xf0u, 0xf00u, 0xf000u);
      q[2u * v] = floats_of(uvec4(raw[v]) & place);
      q[2u * v + 1u] = floats_of(uvec4(raw[v] >> 16) & place);
    }
  } else {
    [[unroll]] for (uint v = 0u; v < 2u; ++v) {
      uvec4 x, y;
      nibbles(raw[v], x, y);
      if (has_high_bits()) add_high_bits(raw[2u + v], x, y);
      q[2u * v] = floats_of(x);
      q[2u * v + 1u] = floats_of(y);
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

void sum_chunks(Floats x, Floats norm, Matrix m, uint row0, uint weight[8]) {
  uint lane = thread() % LANES;
  uint chunks = m.k / (4u * VECTORS);
  // Several strides of quantised weights, which are small, are on their way before the first is used.
#ifdef WEIGHT_Q
  const uint DEEP = OUTS >= 8u ? 1u : OUTS == 4u ? 2u : 4u;
#else
  const uint DEEP = 1u;
#endif
  [[dont_unroll]] for (uint c0 = 0u; c0 < chunks; c0 += DEEP * LANES) {
    uint i0 = c0 + lane;
    uvec4 raw[8];
    uvec4 more[8];
    vec2 scale[8];
    [[unroll]] for (uint j = 0u; j < DEEP * OUTS; ++j) {
      uint i = min(i0 + j / OUTS * LANES, chunks - 1u);
      load_chunk(m, weight[j % OUTS], i, raw[j], more[j], scale[j]);
    }
    [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
      uint i = i0 + u * LANES;
      if (i >= chunks) break;
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        vec4 v[VECTORS];
        float all = 0.0;
        [[unroll]] for (uint e = 0u; e < VECTORS; ++e) {
          v[e] = load_value4(x, (row0 + r) * (m.k / 4u) + i * VECTORS + e);
          if (NORM == 1u) {
            square[r] += dot(v[e], v[e]);
            v[e] *= load_float4(norm, i * VECTORS + e);
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
          sum[r * OUTS + o] += dots;
        }
      }
    }
  }
}

// Rows that are no whole chunks.
void sum_single(Floats x, Floats norm, Matrix m, uint row0, uint weight[8]) {
  for (uint i = thread() % LANES; i < m.k; i += LANES) {
    float w[8];
    [[unroll]] for (uint o = 0u; o < OUTS; ++o) w[o] = load_weight(m, weight[o], i);
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
      float v = load_value(x, (row0 + r) * m.k + i);
      if (NORM == 1u) {
        square[r] += v * v;
        v *= load_float(norm, i);
      }
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[r * OUTS + o] += w[o] * v;
    }
  }
}

// Sums this workgroup's weight rows with its rows of x, and ends them.
void run_rows(Floats x, Floats norm, Matrix m) {
  uint row0 = gl_WorkGroupID.y * ROWS;
  uint weight[8];
  group_rows(weight);
  [[unroll]] for (uint i = 0u; i < ROWS * OUTS; ++i) sum[i] = 0.0;
  [[unroll]] for (uint i = 0u; i < ROWS; ++i) square[i] = 0.0;
  if (WIDE == 1u) {
#ifdef WEIGHT_Q
    // On their way while the rest of the rows is multiplied.
    uint lane = thread() % LANES;
    if (OUTLIERS > 0u) fetch_outliers(m, weight, lane);
#endif
    sum_chunks(x, norm, m, row0, weight);
#ifdef WEIGHT_Q
    for (uint i = lane; i < OUTLIERS / 2u; i += LANES) {
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) add_outliers(x, norm, m.k, row0 + r, r * OUTS);
      fetch_outliers(m, weight, i + LANES);
    }
#endif
  } else {
    sum_single(x, norm, m, row0, weight);
  }
  [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
    join_row(r);
    row_end(row0 + r);
  }
}

#endif
