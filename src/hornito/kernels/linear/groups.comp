// Linear for one row and quantised weights on software drivers with subgroups, where every lane's load
// is a load of its own: a lane owns OUTPUTS output rows and takes 32 weights of one at a time, whose
// integers are summed up before their scale counts. Eight lanes load 32 values of x once and hand them
// round by subgroup broadcast for 8 * OUTPUTS output rows.
//
// variant: q WEIGHT_Q
// variant: gated_q GATED WEIGHT_Q
//
// Geometry: 8 threads = 8 * OUTPUTS output rows (x); one row of x (y).
// Requires: a subgroup of at least 8, subgroup ballot operations; K a multiple of 32.
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 OUTPUTS (1 to 8), 6 SOFTCAP, 7 FORMAT, 8 GROUP,
// 9 OUTLIERS.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "linear.glsl"

layout(local_size_x = 8) in;
layout(constant_id = 3) const uint OUTPUTS = 1u;

// 32 values of x, the same in every lane, and the sums of both halves.
struct Values {
  float x[32];
  vec2 total;
};

// The sum of the eight lanes' parts, in a fixed order.
float join(float part) {
  float a = subgroupBroadcast(part, 0u) + subgroupBroadcast(part, 1u);
  float b = subgroupBroadcast(part, 2u) + subgroupBroadcast(part, 3u);
  float c = subgroupBroadcast(part, 4u) + subgroupBroadcast(part, 5u);
  float d = subgroupBroadcast(part, 6u) + subgroupBroadcast(part, 7u);
  return (a + b) + (c + d);
}

// The eight lanes' values in every lane.
void hand_round(float own, out float x[8]) {
  x[0] = subgroupBroadcast(own, 0u);
  x[1] = subgroupBroadcast(own, 1u);
  x[2] = subgroupBroadcast(own, 2u);
  x[3] = subgroupBroadcast(own, 3u);
  x[4] = subgroupBroadcast(own, 4u);
  x[5] = subgroupBroadcast(own, 5u);
  x[6] = subgroupBroadcast(own, 6u);
  x[7] = subgroupBroadcast(own, 7u);
}

Values load_values(uint at, uint lane) {
  Values v;
  float own[4];
  [[unroll]] for (uint c = 0u; c < 4u; ++c) {
    own[c] = load_value(p.x, at + 8u * c + lane);
    float x[8];
    hand_round(own[c], x);
    [[unroll]] for (uint e = 0u; e < 8u; ++e) v.x[8u * c + e] = x[e];
  }
  v.total = vec2(join(own[0] + own[1]), join(own[2] + own[3]));
  return v;
}

// sum + bits `mask` of w, as a number, times x. Bits stay at their place in the word, and x is scaled
// down for it: by a power of two, so exactly, and once for all output rows.
float add_bits(float sum, uint w, uint mask, float place, float x) {
  return fma(float(int(w & mask)), x * place, sum);
}

// The eight 4-bit integers of a word times x from `at` on.
float add_nibbles(float sum, uint w, Values v, uint at) {
  sum = add_bits(sum, w, 0xfu, 1.0, v.x[at]);
  sum = add_bits(sum, w, 0xf0u, 1.0 / 16.0, v.x[at + 1u]);
  sum = add_bits(sum, w, 0xf00u, 1.0 / 256.0, v.x[at + 2u]);
  sum = add_bits(sum, w, 0xf000u, 1.0 / 4096.0, v.x[at + 3u]);
  sum = add_bits(sum, w, 0xf0000u, 1.0 / 65536.0, v.x[at + 4u]);
  sum = add_bits(sum, w, 0xf00000u, 1.0 / 1048576.0, v.x[at + 5u]);
  sum = add_bits(sum, w, 0xf000000u, 1.0 / 16777216.0, v.x[at + 6u]);
  return add_bits(sum, w >> 28, 0xfu, 1.0, v.x[at + 7u]);
}

// The four bytes of a word, unsigned, times x from `at` on.
float add_bytes(float sum, uint w, Values v, uint at) {
  sum = add_bits(sum, w, 0xffu, 1.0, v.x[at]);
  sum = add_bits(sum, w, 0xff00u, 1.0 / 256.0, v.x[at + 1u]);
  sum = add_bits(sum, w, 0xff0000u, 1.0 / 65536.0, v.x[at + 2u]);
  return add_bits(sum, w >> 24, 0xffu, 1.0, v.x[at + 3u]);
}

// Fifth bits (or with two, fifth and sixth) of the weights from `at` on, whose word begins with them.
float add_high(float sum, uint w, uint bits, Values v, uint at) {
  uint count = 32u / bits;
  uint mask = (1u << bits) - 1u;
  [[unroll]] for (uint e = 0u; e < count; ++e) {
    // The last bits would be a sign.
    uint shift = e == count - 1u ? 0u : bits * e;
    uint own = e == count - 1u ? w >> (32u - bits) : w;
    sum = add_bits(sum, own, mask << shift, 16.0 / float(1u << shift), v.x[at + e]);
  }
  return sum;
}

// 32 weights of a row from 32 * i on, times x.
float add_group(float sum, Matrix m, uint row, uint i, Values v) {
  uint at = row * (m.k / 32u) + i;
  float total = v.total.x + v.total.y;
  if (FORMAT == BF16) {
    [[unroll]] for (uint c = 0u; c < 4u; ++c) {
      vec4 a, b;
      load_quants8(m, row, 4u * i + c, a, b);
      [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        sum = fma(a[e], v.x[8u * c + e], sum);
        sum = fma(b[e], v.x[8u * c + 4u + e], sum);
      }
    }
    return sum;
  }
  vec2 scale = load_scale(m, row, 4u * i);
  if (FORMAT == INT8) {
    float even = 0.0, odd = 0.0;
    [[unroll]] for (uint c = 0u; c < 2u; ++c) {
      // Bytes with 128 added to them.
      uvec4 w = load_words4(m.at, 2u * at + c) ^ 0x80808080u;
      even = add_bytes(even, w.x, v, 16u * c);
      odd = add_bytes(odd, w.y, v, 16u * c + 4u);
      even = add_bytes(even, w.z, v, 16u * c + 8u);
      odd = add_bytes(odd, w.w, v, 16u * c + 12u);
    }
    return fma(scale.x, fma(-128.0, total, even + odd), sum);
  }
  uvec4 w = load_words4(m.at, at);
  vec2 low = vec2(add_nibbles(0.0, w.x, v, 0u), add_nibbles(0.0, w.z, v, 16u));
  low = vec2(add_nibbles(low.x, w.y, v, 8u), add_nibbles(low.y, w.w, v, 24u));
  if (FORMAT == Q6K) {
    uvec2 high = load_words2(m.at, body_words(m) / 2u + at);
    low = vec2(add_high(low.x, high.x, 2u, v, 0u), add_high(low.y, high.y, 2u, v, 16u));
    vec2 second = load_scale(m, row, 4u * i + 2u);
    sum = fma(scale.x, fma(-32.0, v.total.x, low.x), sum);
    return fma(second.x, fma(-32.0, v.total.y, low.y), sum);
  }
  float dot = low.x + low.y;
  if (has_high_bits()) dot = add_high(dot, load_word(m.at, body_words(m) + at), 1u, v, 0u);
  if (FORMAT == INT4) return fma(scale.x, fma(-8.0, total, dot), sum);
  if (FORMAT == Q5) return fma(scale.x, fma(-16.0, total, dot), sum);
  return fma(scale.x, dot, fma(scale.y, total, sum));
}

// Eight outliers of a row, times x.
float add_outliers(float sum, Matrix m, uint row, uint i, float x[8]) {
  vec4 a, b;
  load_outliers8(m, row, i, a, b);
  [[unroll]] for (uint e = 0u; e < 4u; ++e) {
    sum = fma(a[e], x[e], sum);
    sum = fma(b[e], x[4u + e], sum);
  }
  return sum;
}

void main() {
  uint lane = gl_SubgroupInvocationID;
  uint n0 = gl_WorkGroupID.x * 8u * OUTPUTS + lane;
  uint r = gl_WorkGroupID.y;
  if (r >= live_rows()) return;
  Matrix m = matrix();
  float sum[8];
#ifdef GATED
  float up[8];
#endif
  [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
    sum[j] = 0.0;
#ifdef GATED
    up[j] = 0.0;
#endif
  }
  for (uint i = 0u; i < p.k / 32u; ++i) {
    Values v = load_values(r * p.k + 32u * i, lane);
    [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
      uint own = weight_row(min(n0 + 8u * j, p.n - 1u));
      sum[j] = add_group(sum[j], m, own, i, v);
#ifdef GATED
      up[j] = add_group(up[j], m, own + 1u, i, v);
#endif
    }
  }
  for (uint i = 0u; i < OUTLIERS / 8u; ++i) {
    float x[8];
    hand_round(load_value(p.x, r * p.k + load_outlier_column(m, 8u * i + lane)), x);
    [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
      uint own = weight_row(min(n0 + 8u * j, p.n - 1u));
      sum[j] = add_outliers(sum[j], m, own, i, x);
#ifdef GATED
      up[j] = add_outliers(up[j], m, own + 1u, i, x);
#endif
    }
  }
  [[unroll]] for (uint j = 0u; j < OUTPUTS; ++j) {
    uint n = n0 + 8u * j;
    if (n < p.n) {
#ifdef GATED
      finish(r, n, sum[j], up[j]);
#else
      finish(r, n, sum[j]);
#endif
    }
  }
}
