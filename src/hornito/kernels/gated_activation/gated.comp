// out = activation(gate) * up over rows of one width. Rows past the live count are left alone.
//
// Geometry: 64 threads an element each; x covers the width, y rows.
// Push: addresses of gate, up, out [T, I], the call header {live rows}; I.
// Specialisation: 0 ACTIVATION (0 SiLU, 1 tanh GELU).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "activation.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint ACTIVATION = 0u;

layout(push_constant) uniform Push {
  Floats gate;
  Floats up;
  Floats result;
  Words call;
  uint width;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  uint i = gl_GlobalInvocationID.x;
  if (i >= p.width || r >= load_word(p.call, 0u)) return;
  uint at = r * p.width + i;
  store_value(p.result, at, activate(ACTIVATION, load_value(p.gate, at)) * load_value(p.up, at));
}
