// out = a + b over rows of one width. Rows past the live count are left alone.
//
// Geometry: 64 threads an element each; x covers the width, y rows.
// Push: addresses of a, b, out [T, H], the call header {live rows}; H.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "values.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Floats a;
  Floats b;
  Floats result;
  Words call;
  uint width;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  uint i = gl_GlobalInvocationID.x;
  if (i >= p.width || r >= load_word(p.call, 0u)) return;
  uint at = r * p.width + i;
  store_value(p.result, at, load_value(p.a, at) + load_value(p.b, at));
}
