// How workgroups of one dispatch leave parts of a result to whichever of them comes last.
#ifndef HORNITO_ARRIVAL
#define HORNITO_ARRIVAL

#include "memory.glsl"

// What one workgroup writes and another reads within a dispatch.
layout(buffer_reference, std430, buffer_reference_align = 4) coherent buffer Passed { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) coherent buffer Passed2 { vec2 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer Passed4 { vec4 at[]; };

shared uint arrived;

// Whether this workgroup is the last of `count` at counter i, which is zero before and after: all that
// they passed can then be read. Every thread of the workgroup must call it.
bool arrives_last(Words counters, uint i, uint count) {
  memoryBarrierBuffer();
  barrier();
  if (gl_LocalInvocationID.x == 0u) arrived = add_word(counters, i, 1u);
  barrier();
  if (arrived + 1u != count) return false;
  memoryBarrierBuffer();
  if (gl_LocalInvocationID.x == 0u) store_word(counters, i, 0u);
  return true;
}

#endif
