// Joins the live splits of split.comp: out = sum(partial * exp(max_s - max)) / sum(sum_s * exp(...)).
//
// Geometry: 64 threads, one workgroup a head (x) and row (y).
// Push: addresses of the row records, partial [T, heads, SPLITS, D], stats [T, heads, SPLITS, 2],
// out [T, heads, D]; D, window.
// Specialisation: 0 SPLITS.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "attention.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint SPLITS = 1u;

layout(push_constant) uniform Push {
  Words rows;
  Floats partial;
  Floats stats;
  Floats result;
  uint head_dim;
  uint window;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  uint count = split_keys(row.position, p.window, SPLITS).count;
  uint head = r * gl_NumWorkGroups.x + gl_WorkGroupID.x;
  float best = MASKED;
  for (uint s = 0u; s < count; ++s) best = max(best, load_float(p.stats, (head * SPLITS + s) * 2u));
  float sum = 0.0;
  for (uint s = 0u; s < count; ++s) {
    uint at = (head * SPLITS + s) * 2u;
    sum += load_float(p.stats, at + 1u) * exp(load_float(p.stats, at) - best);
  }
  for (uint d = gl_LocalInvocationID.x; d < p.head_dim; d += 64u) {
    float v = 0.0;
    for (uint s = 0u; s < count; ++s) {
      uint at = head * SPLITS + s;
      float weight = exp(load_float(p.stats, at * 2u) - best);
      v += load_float(p.partial, at * p.head_dim + d) * weight;
    }
    store_value(p.result, head * p.head_dim + d, v / sum);
  }
}
