// Joins the partial records of partial.comp over the whole vocabulary: the largest logit's id (lowest
// on ties), its log-probability and that of the given next id; and, with UPDATE, the step itself: the
// row's token, position and flags for the next step. Nothing of it needs the host.
//
// Geometry: 128 threads, one workgroup a row (x).
// Push: addresses of the row records, selection [S], partial [S, RUNS, 4], given logits [S], EOS ids,
// records out (step.glsl), given log-probabilities out [S], the call header; live_word, runs, count of
// EOS ids, ring.
// Specialisation: 0 GIVEN (1: log-probability of the given id), 1 UPDATE (1: advance the row).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

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

#include "reduce.glsl"
#include "softmax_join.glsl"
#include "step.glsl"

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = load_word(p.selection, s);
  uvec4 row = load_words4(p.rows, 2u * r);
  uvec4 more = load_words4(p.rows, 2u * r + 1u);
  if ((row.w & ROW_LIVE) == 0u) return;

  Joined all = join_partials(t, p.partial, s, p.runs);
  if (t != 0u) return;

  if (GIVEN == 1u) {
    store_float(p.given_logprob, s, load_float(p.given, s) - all.largest - all.log_sum);
  }
  uint token = isnan(all.sum) || isinf(all.largest) ? NOT_A_NUMBER : all.id;
  finish_step(s, r, row, more, token, -all.log_sum);
}
