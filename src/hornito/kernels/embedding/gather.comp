// Embedding gather: out[r, :] = table[token(r), :] * scale; a row that the host gave as an
// embedding is copied as it is. Rows that are not live are left alone. Ids are integers from the row
// record to the address.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
//
// Geometry: 64 threads a row, one workgroup a row (x).
// Push: addresses of the row records, table [V, H], embedded rows [T, H] fp32, out [T, H]; H, scale, V.
// Specialisation (q): 7 FORMAT, 8 GROUP, 9 OUTLIERS.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "rows.glsl"
#include "values.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Words table;
  Floats embedded;
  Floats result;
  uint width;
  float scale;
  uint vocabulary;
} p;

void main() {
  uint r = gl_WorkGroupID.x;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  Matrix m = Matrix(p.table, p.vocabulary, p.width);
  if (!row.embedded && p.width % 8u == 0u) {
    for (uint i = gl_LocalInvocationID.x; i < p.width / 8u; i += 64u) {
      vec4 a, b;
      load_weights8(m, row.token, i, a, b);
      uint at = (r * p.width) / 4u + 2u * i;
      store_value4(p.result, at, a * p.scale);
      store_value4(p.result, at + 1u, b * p.scale);
    }
#ifdef WEIGHT_Q
    if (OUTLIERS == 0u) return;
    // The body's numbers are in memory before outliers are added to some of them.
    memoryBarrierBuffer();
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < OUTLIERS / 8u; i += 64u) {
      vec4 a, b;
      load_outliers8(m, row.token, i, a, b);
      for (uint e = 0u; e < 8u; ++e) {
        uint at = r * p.width + load_outlier_column(m, 8u * i + e);
        float more = e < 4u ? a[e & 3u] : b[e & 3u];
        add_to_value(p.result, at, more * p.scale);
      }
    }
#endif
    return;
  }
  for (uint i = gl_LocalInvocationID.x; i < p.width; i += 64u) {
    uint at = r * p.width + i;
    float v =
        row.embedded ? load_float(p.embedded, at) : load_weight(m, row.token, i) * p.scale;
    store_value(p.result, at, v);
  }
}
