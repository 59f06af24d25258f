// Embedding gather: out[r, :] = table[token(r), :] * scale, in fp32; a row that the host gave as an
// embedding is copied as it is. Rows that are not live are left alone. Ids are integers from the row
// record to the address.
//
// variant: f32
// variant: f16 WEIGHT_F16
//
// Geometry: 64 threads a row, one workgroup a row (x).
// Push: addresses of the row records, table [V, H], embedded rows [T, H], out [T, H] fp32; H, scale.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Words table;
  Floats embedded;
  Floats result;
  uint width;
  float scale;
} p;

void main() {
  uint r = gl_WorkGroupID.x;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  for (uint i = gl_LocalInvocationID.x; i < p.width; i += 64u) {
    uint at = r * p.width + i;
    float v = row.embedded ? load_float(p.embedded, at)
                           : load_weight(p.table, row.token * p.width + i) * p.scale;
    store_float(p.result, at, v);
  }
}
