// How kernels reach memory: every buffer is a 64-bit device address, every load and store is here.
// Another binding model needs another version of this file and no other change.
#ifndef HORNITO_MEMORY
#define HORNITO_MEMORY

#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Words { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Floats { float at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Words4 { uvec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) buffer Floats4 { vec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) buffer Addresses { uvec2 at[]; };

uint load_word(Words p, uint i) { return p.at[i]; }
uvec2 load_words2(Words p, uint i2) { return Addresses(uvec2(p)).at[i2]; }
uvec4 load_words4(Words p, uint i4) { return Words4(uvec2(p)).at[i4]; }
float load_float(Floats p, uint i) { return p.at[i]; }
vec4 load_float4(Floats p, uint i4) { return Floats4(uvec2(p)).at[i4]; }
uvec2 load_address(Addresses p, uint i) { return p.at[i]; }

void store_word(Words p, uint i, uint v) { p.at[i] = v; }
void store_words2(Words p, uint i2, uvec2 v) { Addresses(uvec2(p)).at[i2] = v; }
void store_float(Floats p, uint i, float v) { p.at[i] = v; }
void store_float4(Floats p, uint i4, vec4 v) { Floats4(uvec2(p)).at[i4] = v; }

// Adds to a word that other workgroups add to as well, and returns what was there. Integers only:
// their sum does not depend on the order.
uint add_word(Words p, uint i, uint v) { return atomicAdd(p.at[i], v); }

// Half i of a buffer of packed 16-bit floats.
float load_half(Words p, uint i) {
  vec2 pair = unpackHalf2x16(p.at[i >> 1]);
  return (i & 1u) == 0u ? pair.x : pair.y;
}

// Eight packed 16-bit floats.
void unpack8(uvec4 w, out vec4 a, out vec4 b) {
  a = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
  b = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
}

// fp32 to fp16 bits: round to nearest even by integer maths, finite values saturate at 65504.
uint half_bits(float v) {
  uint bits = floatBitsToUint(v);
  uint sign = (bits >> 16) & 0x8000u;
  uint mag = bits & 0x7fffffffu;
  if (mag > 0x7f800000u) return sign | 0x7e00u;                 // NaN
  if (mag == 0x7f800000u) return sign | 0x7c00u;                // infinity stays
  if (mag >= 0x477ff000u) return sign | 0x7bffu;                // saturate
  if (mag < 0x38800000u) {                                      // subnormal half
    if (mag < 0x33000000u) return sign;
    uint shift = 126u - (mag >> 23);                            // 14..24
    uint frac = (mag & 0x7fffffu) | 0x800000u;
    uint kept = frac >> shift;
    uint rest = frac & ((1u << shift) - 1u);
    uint tie = 1u << (shift - 1u);
    if (rest > tie || (rest == tie && (kept & 1u) == 1u)) kept += 1u;
    return sign | kept;
  }
  uint rounded = mag + 0xfffu + ((mag >> 13) & 1u);
  return sign | ((rounded - 0x38000000u) >> 13);
}

uint pack_halves(float a, float b) { return half_bits(a) | (half_bits(b) << 16); }

// Stores half i alone; by atomics, because another thread may store the other half of the word.
void store_half(Words p, uint i, float v) {
  uint shift = (i & 1u) * 16u;
  atomicAnd(p.at[i >> 1], 0xffff0000u >> shift);
  atomicOr(p.at[i >> 1], half_bits(v) << shift);
}

#endif
