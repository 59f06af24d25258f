// Third pass of sampling: the bin in which top-k, or top-p, ends. Ids in lower bins are kept, those in
// higher bins are not, and those of the bin itself go into a list (collect.comp), where they are
// compared one by one. With both filters on the list holds every id up to top-k's bin, because top-p
// counts the weight that top-k leaves.
//
// Geometry: 128 threads, one workgroup a row (x).
// Push: addresses of the parameters [S, 16], histogram [S, 3, BINS], cut records out (sampling.glsl),
// row records, selection [S], the call header; live_word.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "sampling.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Words params;
  Words histogram;
  Words cut;
  Words rows;
  Words selection;
  Words call;
  uint live_word;
} p;

const uint EACH = BINS / 128u;

shared uint found_bin;
shared uvec2 found_before;

// The first bin at which the running sum reaches `wanted`, and the sum before it. `v` holds this
// thread's bins; BINS when the sum never gets there.
void find_bin(uint t, uvec2 v[EACH], uvec2 wanted) {
  barrier();
  if (t == 0u) found_bin = BINS;
  uvec2 own = uvec2(0u);
  for (uint i = 0u; i < EACH; ++i) own = add64(own, v[i]);
  uvec2 reached = scan64(t, own);
  uvec2 sum = sub64(reached, own);
  if (less64(sum, wanted) && !less64(reached, wanted)) {
    for (uint i = 0u; i < EACH; ++i) {
      uvec2 next = add64(sum, v[i]);
      if (less64(sum, wanted) && !less64(next, wanted)) {
        found_bin = t * EACH + i;
        found_before = sum;
      }
      sum = next;
    }
  }
  barrier();
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  if ((load_word(p.rows, 8u * load_word(p.selection, s) + 3u) & ROW_LIVE) == 0u) return;
  Sampling q = load_sampling(p.params, s);
  if ((q.flags & SAMPLE_GREEDY) != 0u) return;

  uint first = BINS, last = BINS, wanted = 0u;
  uvec2 before = uvec2(0u), all = uvec2(0u);
  if ((q.flags & (SAMPLE_TOP_K | SAMPLE_TOP_P)) != 0u) {
    uvec2 ids[EACH], weights[EACH];
    for (uint i = 0u; i < EACH; ++i) {
      uint at = s * 3u * BINS + t * EACH + i;
      ids[i] = uvec2(load_word(p.histogram, at), 0u);
      weights[i] = uvec2(load_word(p.histogram, at + BINS), load_word(p.histogram, at + 2u * BINS));
    }
    bool by_count = false;
    if ((q.flags & SAMPLE_TOP_K) != 0u) {
      find_bin(t, ids, uvec2(q.top_k, 0u));
      by_count = found_bin < BINS;  // else every id with a weight is among the k
    }
    if (by_count) {
      last = found_bin;
      bool both = (q.flags & SAMPLE_TOP_P) != 0u;
      first = both ? 0u : last;
      wanted = q.top_k - (both ? 0u : found_before.x);
    } else if ((q.flags & SAMPLE_TOP_P) != 0u) {
      uvec2 own = uvec2(0u);
      for (uint i = 0u; i < EACH; ++i) own = add64(own, weights[i]);
      scan64(t, own);
      all = scan_sum[127];
      uvec2 target = scale32(all, q.top_p);
      find_bin(t, weights, target == uvec2(0u) ? uvec2(1u, 0u) : target);
      first = found_bin;
      last = found_bin;
      before = found_before;
    }
  }
  if (t == 0u) {
    uint at = cut_at(s);
    store_word(p.cut, at, first);
    store_word(p.cut, at + 1u, last);
    store_word(p.cut, at + 2u, wanted);
    store_word(p.cut, at + 3u, 0u);
    store_word(p.cut, at + 4u, before.x);
    store_word(p.cut, at + 5u, before.y);
    store_word(p.cut, at + 6u, all.x);
    store_word(p.cut, at + 7u, all.y);
  }
}
