// First pass of sampling, over a tile of logits: keeps the raw logits, adjusts them (bias, then
// repetition, presence and frequency penalties; the lowest number where the row's mask forbids the
// id), and reduces each run of 1024 ids. Clears the histogram of the next pass.
//
// Geometry: 128 threads; x = runs of 1024 ids of this tile, y = rows.
// Push: addresses of logits [S, WIDTH], raw out [S, 1024 RUNS], adjusted out [S, 1024 RUNS], partial
// out (sampling.glsl), parameters [S, 16], biases [S, 1024, 2] (id, fp32), counts [slots, V] (bit 31:
// in the prompt; below: how often generated), masks [S, V / 32 rounded up] (bit i of word w: id
// 32 w + i may be chosen; read only with SAMPLE_MASKED), histogram [S, 3, BINS], row records,
// selection [S], the call header; live_word, width and first id of the tile, runs and ids of the whole
// vocabulary.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "reduce.glsl"
#include "sampling.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Words logits;
  Floats raw;
  Floats adjusted;
  Words partial;
  Words params;
  Words biases;
  Words counts;
  Words masks;
  Words histogram;
  Words rows;
  Words selection;
  Words call;
  uint live_word;
  uint width;
  uint first_id;
  uint runs;
  uint vocabulary;
} p;

shared float bias_of[RUN];

float adjust(float v, uint i, uint word, Sampling q) {
  precise float a = v;
  if (q.biases > 0u) a = a + bias_of[i];
  if (word != 0u) {
    if (q.repetition != 1.0) a = a > 0.0 ? a / q.repetition : a * q.repetition;
    uint count = word & 0x7fffffffu;
    if (count > 0u) {
      precise float taken = q.frequency * float(count);
      taken = taken + q.presence;
      a = a - taken;
    }
  }
  return clamp(a, LOWEST, -LOWEST);
}

bool forbidden(uint s, uint id, Sampling q) {
  if ((q.flags & SAMPLE_MASKED) == 0u) return false;
  uint word = load_word(p.masks, s * ((p.vocabulary + 31u) / 32u) + id / 32u);
  return ((word >> (id & 31u)) & 1u) == 0u;
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.y;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = load_word(p.selection, s);
  uvec4 row = load_words4(p.rows, 2u * r);
  if ((row.w & ROW_LIVE) == 0u) return;
  Sampling q = load_sampling(p.params, s);
  uint from = gl_WorkGroupID.x * RUN;
  uint count = min(RUN, p.width - from);
  uint run = p.first_id / RUN + gl_WorkGroupID.x;
  uint out_at = s * p.runs * RUN + run * RUN;

  if (run == 0u) {
    for (uint i = t; i < 3u * BINS; i += 128u) store_word(p.histogram, s * 3u * BINS + i, 0u);
  }
  if (q.biases > 0u) {
    for (uint i = t; i < RUN; i += 128u) bias_of[i] = 0.0;
    barrier();
    for (uint i = t; i < q.biases; i += 128u) {
      uint at = (s * MOST_BIAS + i) * 2u;
      uint place = load_word(p.biases, at) - run * RUN;
      if (place < count) bias_of[place] = uintBitsToFloat(load_word(p.biases, at + 1u));
    }
    barrier();
  }

  float best = LOWEST, top = LOWEST;
  uint id = NO_ID, top_id = NO_ID;
  for (uint i = t; i < count; i += 128u) {
    float v = uintBitsToFloat(load_word(p.logits, s * p.width + from + i));
    store_float(p.raw, out_at + i, v);
    uint seen = 0u;
    if ((q.flags & SAMPLE_PENALTIES) != 0u) {
      seen = load_word(p.counts, row.z * p.vocabulary + run * RUN + i);
    }
    bool out_of_reach = forbidden(s, run * RUN + i, q);
    float a = out_of_reach ? LOWEST : adjust(v, i, seen, q);
    store_float(p.adjusted, out_at + i, a);
    if (id == NO_ID || v > best) {
      best = v;
      id = run * RUN + i;
    }
    if (!out_of_reach && (top_id == NO_ID || a > top)) {
      top = a;
      top_id = run * RUN + i;
    }
  }
  reduce_best(t, best, id);
  reduce_best(t, top, top_id);
  float sum = 0.0;
  for (uint i = t; i < count; i += 128u) {
    sum += exp(uintBitsToFloat(load_word(p.logits, s * p.width + from + i)) - best);
  }
  sum = reduce_sum(t, sum);
  if (t == 0u) {
    uint at = partial_at(s, p.runs, run);
    store_word(p.partial, at, floatBitsToUint(best));
    store_word(p.partial, at + 1u, id);
    store_word(p.partial, at + 2u, floatBitsToUint(sum));
    store_word(p.partial, at + 3u, floatBitsToUint(top));
    store_word(p.partial, at + 4u, top_id);
  }
}
