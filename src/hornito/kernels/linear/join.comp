// Adds the raw sums of coopmat.comp's splits of K in order, and ends the linear with them.
//
// variant: default
// variant: gated GATED
//
// Geometry: 64 threads of four neighbouring weight rows each (x); y = rows.
// Push: see linear.glsl; x holds [SPLITS, k, weight rows] raw sums, where k counts the rows of a split.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 5 SPLITS, 6 SOFTCAP.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "linear4.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 5) const uint SPLITS = 1u;

void main() {
  uint r = gl_WorkGroupID.y;
  uint weight = gl_GlobalInvocationID.x * 4u;
  uint weight_end = p.n * OUTPUT_ROWS;
  if (r >= live_rows() || weight >= weight_end) return;
  vec4 sum = vec4(0.0);
  for (uint s = 0u; s < SPLITS; ++s) {
    uint at = (s * p.k + r) * weight_end + weight;
    if (weight_end % 4u == 0u) {
      sum += load_float4(p.x, at / 4u);
    } else {
      for (uint c = 0u; c < 4u; ++c) {
        if (weight + c < weight_end) sum[c] += load_float(p.x, at + c);
      }
    }
  }
  finish4(r, weight, sum);
}
