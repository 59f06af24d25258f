// out[s, :] = x[selection[s], :].
//
// Geometry: 64 threads a row, one workgroup a row (x).
// Push: addresses of x [T, H], selection [S], out [S, H], the call header; which of its words counts
// out's live rows; H.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "values.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Floats x;
  Words selection;
  Floats result;
  Words call;
  uint live_word;
  uint width;
} p;

void main() {
  uint s = gl_WorkGroupID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = load_word(p.selection, s);
  for (uint i = gl_LocalInvocationID.x; i < p.width; i += 64u) {
    store_value(p.result, s * p.width + i, load_value(p.x, r * p.width + i));
  }
}
