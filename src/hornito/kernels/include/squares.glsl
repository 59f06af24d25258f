// The sum of squares that a thread of 128 adds up of one row, in the one order that every norm keeps:
// four neighbours at a time where the width allows.
#ifndef HORNITO_SQUARES
#define HORNITO_SQUARES

#include "values.glsl"

float squares(Floats x, uint base, uint width, uint t) {
  float sum = 0.0;
  if (width % 4u == 0u) {
    for (uint i = t; i < width / 4u; i += 128u) {
      vec4 v = load_value4(x, base / 4u + i);
      sum += dot(v, v);
    }
  } else {
    for (uint i = t; i < width; i += 128u) {
      float v = load_value(x, base + i);
      sum += v * v;
    }
  }
  return sum;
}

#endif
