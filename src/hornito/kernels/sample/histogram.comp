// Second pass of sampling: how many ids, and how much weight, lie in each bin of distance from the
// largest adjusted logit. Rows without top-k and top-p need none.
//
// Geometry: 128 threads; x = runs of 1024 ids, y = rows.
// Push: addresses of adjusted [S, 1024 RUNS], partial (sampling.glsl), parameters [S, 16], histogram
// [S, 3, BINS] (count, weight low, weight high; cleared), row records, selection [S], the call header;
// live_word, runs, ids of the vocabulary.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "reduce.glsl"
#include "sampling.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Floats adjusted;
  Words partial;
  Words params;
  Words histogram;
  Words rows;
  Words selection;
  Words call;
  uint live_word;
  uint runs;
  uint vocabulary;
} p;

shared uint ids_in[BINS];
shared uint low_in[BINS];
shared uint high_in[BINS];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.y;
  if (s >= load_word(p.call, p.live_word)) return;
  if ((load_word(p.rows, 8u * load_word(p.selection, s) + 3u) & ROW_LIVE) == 0u) return;
  Sampling q = load_sampling(p.params, s);
  if ((q.flags & SAMPLE_GREEDY) != 0u) return;
  if ((q.flags & (SAMPLE_TOP_K | SAMPLE_TOP_P)) == 0u) return;

  for (uint b = t; b < BINS; b += 128u) {
    ids_in[b] = 0u;
    low_in[b] = 0u;
    high_in[b] = 0u;
  }
  float largest = LOWEST;
  uint id = NO_ID;
  for (uint i = t; i < p.runs; i += 128u) {
    largest = max(largest, uintBitsToFloat(load_word(p.partial, partial_at(s, p.runs, i) + 3u)));
  }
  reduce_best(t, largest, id);

  uint run = gl_WorkGroupID.x;
  uint count = min(RUN, p.vocabulary - run * RUN);
  for (uint i = t; i < count; i += 128u) {
    float v = load_float(p.adjusted, (s * p.runs + run) * RUN + i);
    float d = distance_of(largest, v, q.scale);
    uint b = bin_of(d);
    if (b < BINS - 1u) {
      uint w = weight_of(d);
      atomicAdd(ids_in[b], 1u);
      if (w > 0u && w > ~atomicAdd(low_in[b], w)) atomicAdd(high_in[b], 1u);
    }
  }
  barrier();
  for (uint b = t; b < BINS; b += 128u) {
    if (ids_in[b] > 0u) {
      uint at = s * 3u * BINS + b;
      add_word(p.histogram, at, ids_in[b]);
      uint carry = low_in[b] > ~add_word(p.histogram, at + BINS, low_in[b]) ? 1u : 0u;
      add_word(p.histogram, at + 2u * BINS, high_in[b] + carry);
    }
  }
}
