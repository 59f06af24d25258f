// Rotary position embedding. The angle is position * inv_freq in fp32, as the references compute it;
// sine and cosine are our own, because the built-in ones lose bits beyond a few thousand radians.
#ifndef HORNITO_ROPE
#define HORNITO_ROPE

// (sin, cos) of an angle in [0, 2^20), within 3e-7 of the exact values for that fp32 number.
// Cody-Waite: pi/2 is 1.5 + 0.0703125 + 2^-11 less a rest; k times each of the first three is exact.
vec2 sin_cos(float angle) {
  precise float k = floor(angle * 0.636619772367581343 + 0.5);
  precise float r = angle - k * 1.5;
  r = r - k * 0.0703125;
  r = r - k * 4.8828125e-4;
  r = r + k * 4.454455103380768678e-6;
  precise float z = r * r;
  precise float s =
      r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4));
  precise float c = 1.0 - 0.5 * z +
      z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5));
  uint quadrant = uint(k) & 3u;
  vec2 sc = (quadrant & 1u) == 0u ? vec2(s, c) : vec2(c, s);
  if (quadrant == 1u || quadrant == 2u) sc.y = -sc.y;
  if (quadrant >= 2u) sc.x = -sc.x;
  return sc;
}

#endif
