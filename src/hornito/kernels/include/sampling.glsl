// What the sampling kernels share: the parameters of a row, the order and the weight of a logit, and
// the layout of what they tell each other. See docs/sampling.md.
//
// Weights are integers: 2^31 for the largest adjusted logit, 2^31 * exp((l - largest) / temperature)
// for others, from correctly rounded operations only. So sums have no rounding, and every pass, and
// every device, sees the same distribution.
#ifndef HORNITO_SAMPLING
#define HORNITO_SAMPLING

#extension GL_EXT_control_flow_attributes : require

#include "wide.glsl"

const uint SAMPLE_GREEDY = 1u;     // the largest adjusted logit
const uint SAMPLE_PENALTIES = 2u;  // token counts matter
const uint SAMPLE_TOP_K = 4u;
const uint SAMPLE_TOP_P = 8u;
const uint SAMPLE_MASKED = 16u;  // the row's mask says which ids may be chosen

const uint RUN = 1024u;      // ids of one workgroup; 8 for each thread
const uint BINS = 1024u;     // of the first histogram: 32 for each factor of two in weight
const uint MOST_BIAS = 1024u;
const uint MOST_TOP = 20u;

// A row's parameters, 16 words:
// {flags, log2(e) / temperature, top k, top p * 2^32}
// {least weight, repetition, presence, frequency} {seed low, seed high, biases, top n} {free}
struct Sampling {
  uint flags;
  float scale;
  uint top_k;
  uint top_p;
  uint least;
  float repetition;
  float presence;
  float frequency;
  uvec2 seed;
  uint biases;
  uint top_n;
};

Sampling load_sampling(Words params, uint s) {
  uvec4 a = load_words4(params, 4u * s);
  uvec4 b = load_words4(params, 4u * s + 1u);
  uvec4 c = load_words4(params, 4u * s + 2u);
  return Sampling(a.x, uintBitsToFloat(a.y), a.z, a.w, b.x, uintBitsToFloat(b.y),
                  uintBitsToFloat(b.z), uintBitsToFloat(b.w), c.xy, c.z, c.w);
}

// Partial records, 8 words for each row and run: largest raw logit, its lowest id, the sum of
// exp(raw - largest); largest adjusted logit, its lowest id; weight of the run's ids that are kept for
// certain (two words); length of its list.
uint partial_at(uint s, uint runs, uint run) { return (s * runs + run) * 8u; }

// Cut records, 8 words a row: first and last bin of the list (BINS: there is none), ids wanted from
// the list (0: no limit), free, weight of all ids before the list (two words) and of all ids. In the
// end words 2 and 3 are the last kept place: order_of its logit, and its id.
uint cut_at(uint s) { return s * 8u; }

// Bits whose order is that of the floats; -0 equals 0.
uint order_of(float v) {
  uint bits = floatBitsToUint(v);
  if (bits == 0x80000000u) bits = 0u;
  return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// How many factors of two a logit lies below the largest; never less than 0.
float distance_of(float largest, float value, float scale) {
  precise float d = (largest - value) * scale;
  return min(d, 64.0);
}

// 2^31 * 2^-d, rounded down.
uint weight_of(float d) {
  if (d >= 32.0) return 0u;
  precise float whole = floor(d);
  precise float f = d - whole;
  precise float v = 1.09023431e-4;  // 2^-f within 1e-7
  v = v * f;
  v = v - 1.27474891e-3;
  v = v * f;
  v = v + 9.57918037e-3;
  v = v * f;
  v = v - 5.54907574e-2;
  v = v * f;
  v = v + 2.40224368e-1;
  v = v * f;
  v = v - 6.93147064e-1;
  v = v * f;
  v = v + 1.0;
  return uint(v * 2147483648.0) >> uint(whole);
}

// Bin of a distance. Equal logits share a bin, and a larger logit never has a larger bin. All ids of
// the last bin have weight 0.
uint bin_of(float d) { return min(uint(d * 32.0), BINS - 1u); }

shared uvec2 scan_sum[128];

// The sum of `v` over this and all earlier threads; the whole sum is then in scan_sum[127].
uvec2 scan64(uint t, uvec2 v) {
  barrier();
  scan_sum[t] = v;
  [[dont_unroll]] for (uint w = 1u; w < 128u; w <<= 1) {
    barrier();
    uvec2 before = t >= w ? scan_sum[t - w] : uvec2(0u);
    barrier();
    scan_sum[t] = add64(scan_sum[t], before);
  }
  barrier();
  return scan_sum[t];
}

#endif
