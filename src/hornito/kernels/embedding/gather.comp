// Embedding gather: out[r, :] = table[token(r), :], widened to fp32. Rows that are not live are left
// alone. Ids are integers from the row record to the address.
//
// variant: f32
// variant: f16 WEIGHT_F16
//
// Geometry: 64 threads a row, one workgroup a row (x).
// Push: addresses of the row records, table [V, H], out [T, H] fp32; H.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Words table;
  Floats result;
  uint width;
} p;

void main() {
  uint r = gl_WorkGroupID.x;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  for (uint i = gl_LocalInvocationID.x; i < p.width; i += 64u) {
    store_float(p.result, r * p.width + i, load_weight(p.table, row.token * p.width + i));
  }
}
