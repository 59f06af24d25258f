// What comparing two rows of logits comes to: the divergence, the log-probability that each gives to
// the next id of the text, and the most likely id of each.
//
// Geometry: 128 threads, one workgroup a row (x).
// Push: addresses of the partial records of the reference and the model [S, RUNS, 4], their logits of the
// given ids [S], the divergences of quality/divergence [S, RUNS], result [S, 8] (divergence,
// log-probability by the reference, by the model, most likely id by the reference, by the model, and
// three zeros), the call header; live_word, runs.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "reduce.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Words reference_partial;
  Words partial;
  Floats reference_given;
  Floats given;
  Floats divergence;
  Words result;
  Words call;
  uint live_word;
  uint runs;
} p;

#include "softmax_join.glsl"

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  Joined a = join_partials(t, p.reference_partial, s, p.runs);
  Joined b = join_partials(t, p.partial, s, p.runs);
  float sum = 0.0;
  for (uint i = t; i < p.runs; i += 128u) sum += load_float(p.divergence, s * p.runs + i);
  sum = reduce_sum(t, sum);
  if (t != 0u) return;
  uint at = s * 8u;
  store_word(p.result, at, floatBitsToUint(sum));
  float by_reference = load_float(p.reference_given, s) - a.largest - a.log_sum;
  float by_model = load_float(p.given, s) - b.largest - b.log_sum;
  store_word(p.result, at + 1u, floatBitsToUint(by_reference));
  store_word(p.result, at + 2u, floatBitsToUint(by_model));
  store_word(p.result, at + 3u, a.id);
  store_word(p.result, at + 4u, b.id);
  for (uint i = 5u; i < 8u; ++i) store_word(p.result, at + i, 0u);
}
