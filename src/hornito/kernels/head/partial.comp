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

shared float largest[128];
shared uint id_of[128];
shared float sum_of[128];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.y;
  if (s >= load_word(p.call, p.live_word)) return;
  uint from = gl_WorkGroupID.x * 1024u;
  uint to = min(from + 1024u, p.width);
  float best = -3.4e38;
  uint id = 0xffffffffu;
  for (uint i = from + t; i < to; i += 128u) {
    float v = load_float(p.logits, s * p.width + i);
    if (id == 0xffffffffu || v > best) {
      best = v;
      id = i;
    }
  }
  largest[t] = best;
  id_of[t] = id;
  for (uint w = 64u; w > 0u; w >>= 1) {
    barrier();
    if (t < w) {
      float other = largest[t + w];
      if (other > largest[t] || (other == largest[t] && id_of[t + w] < id_of[t])) {
        largest[t] = other;
        id_of[t] = id_of[t + w];
      }
    }
  }
  barrier();
  best = largest[0];
  float sum = 0.0;
  for (uint i = from + t; i < to; i += 128u) {
    sum += exp(load_float(p.logits, s * p.width + i) - best);
  }
  sum_of[t] = sum;
  for (uint w = 64u; w > 0u; w >>= 1) {
    barrier();
    if (t < w) sum_of[t] += sum_of[t + w];
  }
  if (t == 0u) {
    uint at = (s * p.runs + p.first_run + gl_WorkGroupID.x) * 4u;
    store_word(p.partial, at, floatBitsToUint(best));
    store_word(p.partial, at + 1u, p.first_id + id_of[0]);
    store_word(p.partial, at + 2u, floatBitsToUint(sum_of[0]));
    store_word(p.partial, at + 3u, 0u);
    if (GIVEN == 1u) {
      uint next = load_word(p.next_ids, s) - p.first_id;
      if (next >= from && next < to) {
        store_float(p.given, s, load_float(p.logits, s * p.width + next));
      }
    }
  }
}
