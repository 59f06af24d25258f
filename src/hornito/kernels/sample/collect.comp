// Fourth pass of sampling: for each run, the weight of the ids before the list's bins, as far as min-p
// leaves it, and the ids of the list's bins, in order.
//
// Geometry: 128 threads; x = runs of 1024 ids, y = rows.
// Push: addresses of adjusted [S, 1024 RUNS], partial (sampling.glsl), cut records, list out
// [S, RUNS, 1024], parameters [S, 16], row records, selection [S], the call header; live_word, runs,
// ids of the vocabulary.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "reduce.glsl"
#include "sampling.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Floats adjusted;
  Words partial;
  Words cut;
  Words list;
  Words params;
  Words rows;
  Words selection;
  Words call;
  uint live_word;
  uint runs;
  uint vocabulary;
} p;

const uint EACH = RUN / 128u;

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.y;
  if (s >= load_word(p.call, p.live_word)) return;
  if ((load_word(p.rows, 8u * load_word(p.selection, s) + 3u) & ROW_LIVE) == 0u) return;
  Sampling q = load_sampling(p.params, s);
  if ((q.flags & SAMPLE_GREEDY) != 0u) return;

  float largest = LOWEST;
  uint id = NO_ID;
  for (uint i = t; i < p.runs; i += 128u) {
    largest = max(largest, uintBitsToFloat(load_word(p.partial, partial_at(s, p.runs, i) + 3u)));
  }
  reduce_best(t, largest, id);

  uint first = load_word(p.cut, cut_at(s));
  uint last = load_word(p.cut, cut_at(s) + 1u);
  uint run = gl_WorkGroupID.x;
  uint base = (s * p.runs + run) * RUN;
  uint count = min(RUN, p.vocabulary - run * RUN);
  uvec2 kept = uvec2(0u);
  uint listed = 0u;
  for (uint i = t * EACH; i < min(t * EACH + EACH, count); ++i) {
    float d = distance_of(largest, load_float(p.adjusted, base + i), q.scale);
    uint b = bin_of(d);
    if (b < first) {
      uint w = weight_of(d);
      if (w >= q.least) kept = add64(kept, w);
    } else if (b <= last) {
      listed += 1u;
    }
  }
  scan64(t, kept);
  uvec2 all = scan_sum[127];
  uint place = scan64(t, uvec2(listed, 0u)).x - listed;
  uint total = scan_sum[127].x;
  if (listed > 0u) {
    for (uint i = t * EACH; i < min(t * EACH + EACH, count); ++i) {
      uint b = bin_of(distance_of(largest, load_float(p.adjusted, base + i), q.scale));
      if (b >= first && b <= last) {
        store_word(p.list, base + place, run * RUN + i);
        place += 1u;
      }
    }
  }
  if (t == 0u) {
    uint at = partial_at(s, p.runs, run);
    store_word(p.partial, at + 5u, all.x);
    store_word(p.partial, at + 6u, all.y);
    store_word(p.partial, at + 7u, total);
  }
}
