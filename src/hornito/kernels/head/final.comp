// Joins the partial records of partial.comp over the whole vocabulary: the largest logit's id (lowest
// on ties), its log-probability and that of the given next id; and, with UPDATE, the step itself: the
// row's token, position and flags for the next step. Nothing of it needs the host.
//
// Records out, 16 bytes each, at [s, emitted % ring]: token, log-probability, emitted + 1 (a sequence
// number), flags. A token of 0xfffffffe says that the logits hold a NaN.
//
// Geometry: 128 threads, one workgroup a row (x).
// Push: addresses of the row records, selection [S], partial [S, RUNS, 4], given logits [S], EOS ids,
// records out, given log-probabilities out [S], the call header; live_word, runs, count of EOS ids,
// ring.
// Specialisation: 0 GIVEN (1: log-probability of the given id), 1 UPDATE (1: advance the row).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint GIVEN = 0u;
layout(constant_id = 1) const uint UPDATE = 0u;

layout(push_constant) uniform Push {
  Words rows;
  Words selection;
  Words partial;
  Floats given;
  Words eos;
  Words records;
  Floats given_logprob;
  Words call;
  uint live_word;
  uint runs;
  uint eos_count;
  uint ring;
} p;

const uint NOT_A_NUMBER = 0xfffffffeu;

shared float largest[128];
shared uint id_of[128];
shared float sum_of[128];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = load_word(p.selection, s);
  uvec4 row = load_words4(p.rows, 2u * r);
  uvec4 more = load_words4(p.rows, 2u * r + 1u);
  if ((row.w & ROW_LIVE) == 0u) return;

  float best = -3.4e38;
  uint id = 0xffffffffu;
  for (uint i = t; i < p.runs; i += 128u) {
    uint at = (s * p.runs + i) * 4u;
    float v = uintBitsToFloat(load_word(p.partial, at));
    if (id == 0xffffffffu || v > best) {
      best = v;
      id = load_word(p.partial, at + 1u);
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
  for (uint i = t; i < p.runs; i += 128u) {
    uint at = (s * p.runs + i) * 4u;
    sum += uintBitsToFloat(load_word(p.partial, at + 2u)) *
           exp(uintBitsToFloat(load_word(p.partial, at)) - best);
  }
  sum_of[t] = sum;
  for (uint w = 64u; w > 0u; w >>= 1) {
    barrier();
    if (t < w) sum_of[t] += sum_of[t + w];
  }
  if (t != 0u) return;

  float log_sum = log(sum_of[0]);
  if (GIVEN == 1u) store_float(p.given_logprob, s, load_float(p.given, s) - best - log_sum);
  uint token = isnan(sum_of[0]) || isinf(best) ? NOT_A_NUMBER : id_of[0];
  uint flags = row.w;
  if (UPDATE == 1u) {
    bool stop = row.y + 1u >= more.x || token == NOT_A_NUMBER;
    if ((flags & ROW_IGNORE_EOS) == 0u) {
      for (uint i = 0u; i < p.eos_count; ++i) stop = stop || load_word(p.eos, i) == token;
    }
    if (stop) flags &= ~ROW_LIVE;
    store_word(p.rows, 8u * r, token);
    store_word(p.rows, 8u * r + 1u, row.y + 1u);
    store_word(p.rows, 8u * r + 3u, flags);
    store_word(p.rows, 8u * r + 5u, more.y + 1u);
  }
  uint at = (s * p.ring + more.y % p.ring) * 4u;
  store_word(p.records, at, token);
  store_word(p.records, at + 1u, floatBitsToUint(-log_sum));
  store_word(p.records, at + 2u, more.y + 1u);
  store_word(p.records, at + 3u, flags);
}
