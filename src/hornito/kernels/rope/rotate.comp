// RoPE on halves: with a = x[i], b = x[i + R/2] and (s, c) of position * inv_freq[i], times SCALE,
// out[i] = a * c - b * s, out[i + R/2] = b * c + a * s; dims past R pass through.
//
// Geometry: 64 threads; x covers heads * (D - R/2) items, y rows.
// Push: addresses of the row records, x [T, heads, D], inv_freq [R/2], out; heads, D, R/2, scale.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rope.glsl"
#include "rows.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Floats x;
  Floats inv_freq;
  Floats result;
  uint heads;
  uint head_dim;
  uint half_dim;
  float scale;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  Row row = load_row(p.rows, r);
  uint items = p.head_dim - p.half_dim;
  uint item = gl_GlobalInvocationID.x;
  if (!row.live || item >= p.heads * items) return;
  uint i = item % items;
  uint base = (r * p.heads + item / items) * p.head_dim;
  if (i < p.half_dim) {
    vec2 sc = sin_cos(float(row.position) * load_float(p.inv_freq, i)) * p.scale;
    float a = load_value(p.x, base + i);
    float b = load_value(p.x, base + i + p.half_dim);
    store_value(p.result, base + i, a * sc.y - b * sc.x);
    store_value(p.result, base + i + p.half_dim, b * sc.y + a * sc.x);
  } else {
    uint j = base + i + p.half_dim;
    store_value(p.result, j, load_value(p.x, j));
  }
}
