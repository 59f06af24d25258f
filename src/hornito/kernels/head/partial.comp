// One pass over a tile of logits: for each row and run of 1024 ids, the largest logit, its lowest id,
// and the sum of exp(logit - largest); also the logit of the row's given next id.
//
// Geometry: 128 threads; x = runs of 1024 ids of this tile, y = rows.
// Push: addresses of logits [S, WIDTH] fp32, next ids [S], partial out [S, RUNS, 4] (largest, id,
// sum, unused), given logit out [S], the call header; live_word, width and first id of the tile, runs
// of the whole vocabulary, first run of the tile.
// Specialisation: 0 GIVEN (1: look for the given next id).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "reduce.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint GIVEN = 0u;

layout(push_constant) uniform Push {
  Floats logits;
  Words next_ids;
  Words partial;
  Floats given;
  Words call;
  uint live_word;
  uint width;
  uint first_id;
  uint runs;
  uint first_run;
} p;

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.y;
  if (s >= load_word(p.call, p.live_word)) return;
  uint from = gl_WorkGroupID.x * 1024u;
  uint to = min(from + 1024u, p.width);
  float best = LOWEST;
  uint id = NO_ID;
  for (uint i = from + t; i < to; i += 128u) {
    float v = load_float(p.logits, s * p.width + i);
    if (id == NO_ID || v > best) {
      best = v;
      id = i;
    }
  }
  reduce_best(t, best, id);
  float sum = 0.0;
  for (uint i = from + t; i < to; i += 128u) {
    sum += exp(load_float(p.logits, s * p.width + i) - best);
  }
  sum = reduce_sum(t, sum);
  if (t == 0u) {
    uint at = (s * p.runs + p.first_run + gl_WorkGroupID.x) * 4u;
    store_word(p.partial, at, floatBitsToUint(best));
    store_word(p.partial, at + 1u, p.first_id + id);
    store_word(p.partial, at + 2u, floatBitsToUint(sum));
    store_word(p.partial, at + 3u, 0u);
    if (GIVEN == 1u) {
      uint next = load_word(p.next_ids, s) - p.first_id;
      if (next >= from && next < to) {
        store_float(p.given, s, load_float(p.logits, s * p.width + next));
      }
    }
  }
}
