// Elementary functions of one fp32 number, and its rounding to 16 bits: what GLSL lacks, or leaves
// to a driver's precision.
#ifndef HORNITO_ELEMENTARY
#define HORNITO_ELEMENTARY

#include "tensor.glsl"

// exp and its inverse without the overflow of arguments that only saturate.
float safe_exp(float v) { return exp(min(v, 88.7)); }
float sigmoid(float v) { return 1.0 / (1.0 + safe_exp(-v)); }
float log_1p(float v) {
  float u = 1.0 + v;
  return u == 1.0 ? v : log(u) * v / (u - 1.0);
}
float softplus(float v) { return max(v, 0.0) + log_1p(exp(-abs(v))); }

float exp_m1(float v) {
  if (abs(v) < 0.3) {
    float s = 1.0;
    for (int i = 8; i >= 2; i--) s = 1.0 + v / float(i) * s;
    return v * s;
  }
  return exp(v) - 1.0;
}

float tanh_of(float v) {
  float w = abs(v);
  float e = exp_m1(2.0 * min(w, 20.0));
  return (v < 0.0 ? -1.0 : 1.0) * (e / (e + 2.0));
}

float sinh_of(float v) {
  float e = exp_m1(abs(v));
  return (v < 0.0 ? -0.5 : 0.5) * (e + e / (e + 1.0));
}

// The error function: its series near zero, a rational bound times a Gaussian elsewhere.
float erf_of(float v) {
  float w = abs(v);
  if (w < 1.0) {
    float square = w * w, term = w, sum = w;
    for (int i = 1; i < 12; i++) {
      term *= -square / float(i);
      sum += term / float(2 * i + 1);
    }
    return (v < 0.0 ? -1.128379167 : 1.128379167) * sum;
  }
  float t = 1.0 / (1.0 + 0.3275911 * w);
  float q = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 +
            t * 1.061405429))));
  float e = 1.0 - q * exp(-min(w * w, 80.0));
  return v < 0.0 ? -e : e;
}

// Angle whose tangent is v, by one reduction and a series.
float atan_of(float v) {
  float w = abs(v);
  bool turned = w > 1.0;
  if (turned) w = 1.0 / w;
  float base = 0.0;
  if (w > 0.41421356) {
    base = 0.785398163;
    w = (w - 1.0) / (w + 1.0);
  }
  float s = w * w;
  float r = base + w * (1.0 + s * (-0.333333333 + s * (0.2 + s * (-0.142857143 + s * (0.111111111 +
            s * (-0.0909090909 + s * (0.0769230769 - s * 0.0666666667)))))));
  if (turned) r = 1.570796327 - r;
  return v < 0.0 ? -r : r;
}

float asin_of(float v) {
  float rest = sqrt(max(0.0, (1.0 - v) * (1.0 + v)));
  if (abs(v) > 1.0) return uintBitsToFloat(NAN);
  return rest == 0.0 ? (v < 0.0 ? -1.570796327 : 1.570796327) : atan_of(v / rest);
}

// An angle in (-pi/4, pi/4] and its quadrant, for any angle that fp32 resolves.
float reduced(float v, out int quadrant) {
  float turns = roundEven(v * 0.636619772);
  quadrant = int(turns) & 3;
  float r = v - turns * 1.5703125;
  r -= turns * 4.837512969970703e-4;
  return r - turns * 7.549789948768648e-8;
}

float sin_near(float r) {
  float s = r * r;
  return r * (1.0 + s * (-0.1666666667 + s * (0.008333333333 + s * (-1.984126984e-4 +
         s * 2.755731922e-6))));
}
float cos_near(float r) {
  float s = r * r;
  return 1.0 + s * (-0.5 + s * (0.04166666667 + s * (-0.001388888889 + s * 2.480158730e-5)));
}

float sin_shifted(float v, int shift) {
  int quadrant;
  float r = reduced(v, quadrant);
  int q = (quadrant + shift) & 3;
  float f = (q & 1) == 0 ? sin_near(r) : cos_near(r);
  if (!(abs(v) < 3.0e38)) return uintBitsToFloat(NAN);
  return q >= 2 ? -f : f;
}

float asinh_of(float v) {
  float w = abs(v);
  float r = w > 1.0e18 ? log(w) + 0.693147181 : log_1p(w + w * w / (1.0 + sqrt(w * w + 1.0)));
  return v < 0.0 ? -r : r;
}

float pow_of(float a, float b) {
  if (b == 0.0 || a == 1.0) return 1.0;
  bool whole = floor(b) == b;
  if (whole && abs(b) <= 64.0) {
    float r = 1.0, square = a;
    for (int n = int(abs(b)); n > 0; n >>= 1) {
      if ((n & 1) != 0) r *= square;
      square *= square;
    }
    return b < 0.0 ? 1.0 / r : r;
  }
  if (b == 0.5) return sqrt(a);
  if (a < 0.0 && !whole) return uintBitsToFloat(NAN);
  float w = abs(a);
  if (w == 0.0) return b < 0.0 ? uintBitsToFloat(INFINITY) : 0.0;
  float r = exp(b * log(w));
  bool odd = abs(b) < 16777216.0 && (int(b) & 1) != 0;
  return a < 0.0 && odd ? -r : r;
}

// fp32 to the nearest fp16 (ties to even) and back; beyond its range infinity.
float half_of(float v) {
  uint w = floatBitsToUint(v);
  if (nan_word(w)) return v;
  if ((w & 0x7fffffffu) >= 0x477ff000u) return uintBitsToFloat((w & 0x80000000u) | INFINITY);
  return unpackHalf2x16(half_bits(v)).x;
}

float bfloat_of(float v) {
  uint w = floatBitsToUint(v);
  if (nan_word(w)) return v;
  return uintBitsToFloat((w + 0x7fffu + ((w >> 16) & 1u)) & 0xffff0000u);
}

#endif
