// Kullback-Leibler divergence of two rows of logits, each run of 1024 ids: sum of p log(p / q), where p
// is the softmax of the reference's row and q that of the model's.
//
// The sum is taken as p (exp(-d) - 1 + d) with d = log p - log q. That is the same, since both sum to 1,
// but every term is at least 0, and an error e of the two log-sums enters as e * e / 2.
//
// Geometry: 128 threads; x = runs of 1024 ids, y = rows.
// Push: addresses of the reference's logits and the model's [S, WIDTH] fp32, their partial records of
// head/partial [S, RUNS, 4] (largest, id, sum, unused), result [S, RUNS] fp32, the call header;
// live_word, width, runs.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "reduce.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Floats reference;
  Floats logits;
  Words reference_partial;
  Words partial;
  Floats result;
  Words call;
  uint live_word;
  uint width;
  uint runs;
} p;

#include "softmax_join.glsl"

// exp(-d) - 1 + d near 0, where that form would cancel.
float near_zero(float d) {
  return d * d * (0.5 + d * (-1.0 / 6.0 + d * (1.0 / 24.0 + d * (-1.0 / 120.0 + d / 720.0))));
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.y;
  if (s >= load_word(p.call, p.live_word)) return;
  Joined a = join_partials(t, p.reference_partial, s, p.runs);
  Joined b = join_partials(t, p.partial, s, p.runs);
  // Close logits are subtracted first: that is exact, and the rounding of the rest is one for all ids.
  float shift = (a.largest - b.largest) + (a.log_sum - b.log_sum);
  uint from = gl_WorkGroupID.x * 1024u;
  uint to = min(from + 1024u, p.width);
  float sum = 0.0;
  for (uint i = from + t; i < to; i += 128u) {
    float l = load_float(p.reference, s * p.width + i);
    float log_p = l - a.largest - a.log_sum;
    float d = (l - load_float(p.logits, s * p.width + i)) - shift;
    float prob = exp(max(log_p, -80.0));
    if (abs(d) < 0.25) {
      sum += prob * near_zero(d);
    } else {
      sum += exp(max(log_p - d, -80.0)) - prob + prob * d;
    }
  }
  sum = reduce_sum(t, sum);
  if (t == 0u) store_float(p.result, s * p.runs + gl_WorkGroupID.x, sum);
}
