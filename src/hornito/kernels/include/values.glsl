// How kernels reach values: the activations that one op leaves for another. They are fp32 or, at precision
// `low`, fp16, which is rounded to nearest even and saturates; sums are fp32 either way. HALF_INPUTS is
// about what a dispatch reads, HALF_RESULTS about what it writes (ops/base.py passes both): logits and raw
// sums are fp32 always. Indices count numbers, with `4` vectors of four.
#ifndef HORNITO_VALUES
#define HORNITO_VALUES

#include "memory.glsl"

layout(constant_id = 30) const uint HALF_INPUTS = 0u;
layout(constant_id = 31) const uint HALF_RESULTS = 0u;

float load_value(Floats p, uint i) {
  if (HALF_INPUTS == 1u) return load_half(Words(uvec2(p)), i);
  return load_float(p, i);
}

vec4 load_value4(Floats p, uint i4) {
  if (HALF_INPUTS == 0u) return load_float4(p, i4);
  uvec2 w = load_words2(Words(uvec2(p)), i4);
  return vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
}

void store_value(Floats p, uint i, float v) {
  if (HALF_RESULTS == 1u) {
    store_half(Words(uvec2(p)), i, v);
  } else {
    store_float(p, i, v);
  }
}

// Numbers i and i + 1; i is even.
void store_value2(Floats p, uint i, vec2 v) {
  if (HALF_RESULTS == 1u) {
    store_word(Words(uvec2(p)), i >> 1, pack_halves(v.x, v.y));
  } else {
    store_float(p, i, v.x);
    store_float(p, i + 1u, v.y);
  }
}

void store_value4(Floats p, uint i4, vec4 v) {
  if (HALF_RESULTS == 1u) {
    store_words2(Words(uvec2(p)), i4, uvec2(pack_halves(v.x, v.y), pack_halves(v.z, v.w)));
  } else {
    store_float4(p, i4, v);
  }
}

// Adds to a number that this dispatch stored.
void add_to_value(Floats p, uint i, float v) {
  v += HALF_RESULTS == 1u ? load_half(Words(uvec2(p)), i) : load_float(p, i);
  store_value(p, i, v);
}

#endif
