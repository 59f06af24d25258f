// Learned positions: out[r, :] = x[r, :] + table[position(r), :]. Rows that are not live are
// left alone.
//
// variant: f32
// variant: f16 WEIGHT_F16
//
// Geometry: 64 threads an element each; x covers the width, y rows.
// Push: addresses of the row records, x [T, H], table [P, H], out [T, H]; H.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "values.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Floats x;
  Words table;
  Floats result;
  uint width;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  uint i = gl_GlobalInvocationID.x;
  Row row = load_row(p.rows, r);
  if (!row.live || i >= p.width) return;
  uint at = r * p.width + i;
  float v = load_value(p.x, at) + load_weight(Matrix(p.table, 0u, p.width), row.position, i);
  store_value(p.result, at, v);
}
