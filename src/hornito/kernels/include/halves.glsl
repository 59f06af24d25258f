// fp32 to fp16 for the factors of cooperative matrices. Needs explicit fp16 arithmetic.
#ifndef HORNITO_HALVES
#define HORNITO_HALVES

// A conversion, which drivers round to nearest even; packHalf2x16 may cut. Finite values saturate.
uint halves(float a, float b) {
  return packFloat2x16(f16vec2(clamp(vec2(a, b), vec2(-65504.0), vec2(65504.0))));
}

uvec4 pack8(vec4 a, vec4 b) {
  return uvec4(halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w));
}

#endif
