// result = f(a), f(a, b) or a ? b : c, element by element with broadcasting; also casts.
//
// Geometry: 64 threads, an element each. Push: a, b, c, result, table {rank, dims[8], strides of
// a[8], of b[8], of c[8]}, status; count; node; x and y parameters of the function.
// Constants: 0 the function, 1 the kind of a's numbers, 2 the result's type, 3 operands, 4 whether
// every operand has the result's shape (then there is no table).
#version 450
#extension GL_GOOGLE_include_directive : require
#include "elementary.glsl"
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint OP = 0u;
layout(constant_id = 1) const uint KIND = 0u;
layout(constant_id = 2) const uint TYPE = 0u;
layout(constant_id = 3) const uint OPERANDS = 1u;
layout(constant_id = 4) const bool PLAIN = true;

// The numbers are those of hornito.tensor.kernels.FUNCTIONS.
const uint F_IDENTITY = 0u;
const uint F_CAST = 1u;
const uint F_ABS = 2u;
const uint F_NEG = 3u;
const uint F_CEIL = 4u;
const uint F_FLOOR = 5u;
const uint F_ROUND = 6u;
const uint F_SQRT = 7u;
const uint F_RECIPROCAL = 8u;
const uint F_EXP = 9u;
const uint F_LOG = 10u;
const uint F_SIN = 11u;
const uint F_COS = 12u;
const uint F_TAN = 13u;
const uint F_ASIN = 14u;
const uint F_ACOS = 15u;
const uint F_ATAN = 16u;
const uint F_SINH = 17u;
const uint F_COSH = 18u;
const uint F_TANH = 19u;
const uint F_ASINH = 20u;
const uint F_ACOSH = 21u;
const uint F_ATANH = 22u;
const uint F_ERF = 23u;
const uint F_SIGMOID = 24u;
const uint F_SOFTPLUS = 25u;
const uint F_SOFTSIGN = 26u;
const uint F_RELU = 27u;
const uint F_ELU = 28u;
const uint F_SELU = 29u;
const uint F_CELU = 30u;
const uint F_LEAKY_RELU = 31u;
const uint F_THRESHOLDED_RELU = 32u;
const uint F_HARD_SIGMOID = 33u;
const uint F_HARD_SWISH = 34u;
const uint F_GELU = 35u;
const uint F_GELU_TANH = 36u;
const uint F_MISH = 37u;
const uint F_SWISH = 38u;
const uint F_SHRINK = 39u;
const uint F_SIGN = 40u;
const uint F_IS_NAN = 41u;
const uint F_IS_INF = 42u;
const uint F_NOT = 43u;
const uint F_BIT_NOT = 44u;
const uint F_ADD = 64u;
const uint F_SUB = 65u;
const uint F_MUL = 66u;
const uint F_DIV = 67u;
const uint F_POW = 68u;
const uint F_MAX = 69u;
const uint F_MIN = 70u;
const uint F_MOD = 71u;
const uint F_FMOD = 72u;
const uint F_PRELU = 73u;
const uint F_EQUAL = 74u;
const uint F_LESS = 75u;
const uint F_LESS_EQUAL = 76u;
const uint F_GREATER = 77u;
const uint F_GREATER_EQUAL = 78u;
const uint F_AND = 79u;
const uint F_OR = 80u;
const uint F_XOR = 81u;
const uint F_SHIFT_LEFT = 82u;
const uint F_SHIFT_RIGHT = 83u;
const uint F_WHERE = 128u;

const bool EXACT = TYPE == T_INT64 || TYPE == T_UINT64;

float float_mod(float a, float b) {
  if (abs(b) > 3.3e38 && abs(a) < 3.3e38) {  // an infinite divisor
    return OP == F_MOD && a != 0.0 && !is_nan(b) && (a < 0.0) != (b < 0.0) ? b : a;
  }
  float r = a - b * trunc(a / b);
  return OP == F_MOD && r != 0.0 && (r < 0.0) != (b < 0.0) ? r + b : r;
}

float float_unary(float a) {
  switch (OP) {
    case F_ABS: return abs(a);
    case F_NEG: return -a;
    case F_CEIL: return ceil(a);
    case F_FLOOR: return floor(a);
    case F_ROUND: return roundEven(a);
    case F_SQRT: return sqrt(a);
    case F_RECIPROCAL: return 1.0 / a;
    case F_EXP: return exp(a);
    case F_LOG: return log(a);
    case F_SIN: return sin_shifted(a, 0);
    case F_COS: return sin_shifted(a, 1);
    case F_TAN: return sin_shifted(a, 0) / sin_shifted(a, 1);
    case F_ASIN: return asin_of(a);
    case F_ACOS: return a < -0.5 ? 1.570796327 - asin_of(a)
                                 : 2.0 * asin_of(sqrt(max(0.0, (1.0 - a) * 0.5)));
    case F_ATAN: return atan_of(a);
    case F_SINH: return sinh_of(a);
    case F_COSH: return 0.5 * (exp(a) + exp(-a));
    case F_TANH: return tanh_of(a);
    case F_ASINH: return asinh_of(a);
    case F_ACOSH: return log_1p(a - 1.0 + sqrt((a - 1.0) * (a + 1.0)));
    case F_ATANH: return 0.5 * log_1p(2.0 * a / (1.0 - a));
    case F_ERF: return erf_of(a);
    case F_SIGMOID: return sigmoid(a);
    case F_SOFTPLUS: return softplus(a);
    case F_SOFTSIGN: return a / (1.0 + abs(a));
    case F_RELU: return max_float(a, 0.0);
    case F_ELU: return a < 0.0 ? p.x * exp_m1(a) : a;
    case F_SELU: return p.y * (a > 0.0 ? a : p.x * exp_m1(a));
    case F_CELU: return max(a, 0.0) + min(0.0, p.x * exp_m1(a / p.x));
    case F_LEAKY_RELU: return a < 0.0 ? p.x * a : a;
    case F_THRESHOLDED_RELU: return a > p.x ? a : 0.0;
    case F_HARD_SIGMOID: return clamp(p.x * a + p.y, 0.0, 1.0);
    case F_HARD_SWISH: return a * clamp(a / 6.0 + 0.5, 0.0, 1.0);
    case F_GELU: return 0.5 * a * (1.0 + erf_of(a * 0.707106781));
    case F_GELU_TANH: return 0.5 * a * (1.0 + tanh_of(0.797884561 * (a + 0.044715 * a * a * a)));
    case F_MISH: return a * tanh_of(softplus(a));
    case F_SWISH: return a * sigmoid(p.x * a);
    case F_SHRINK: return a < -p.x ? a + p.y : (a > p.x ? a - p.y : 0.0);
    case F_SIGN: return is_nan(a) ? a : sign(a);
    default: return a;
  }
}

float float_binary(float a, float b) {
  switch (OP) {
    case F_ADD: return a + b;
    case F_SUB: return a - b;
    case F_MUL: return a * b;
    case F_DIV: return a / b;
    case F_POW: return pow_of(a, b);
    case F_MAX: return max_float(a, b);
    case F_MIN: return min_float(a, b);
    case F_PRELU: return a < 0.0 ? a * b : a;
    default: return float_mod(a, b);
  }
}

int int_pow(int a, int b) {
  if (b < 0) return a == 1 ? 1 : (a == -1 ? ((b & 1) != 0 ? -1 : 1) : 0);
  int r = 1;
  bool more = b > 0;
  while (more) {
    if ((b & 1) != 0) r = mul_int(r, a, EXACT);
    b >>= 1;
    more = b > 0;
    if (more) a = mul_int(a, a, EXACT);
  }
  return r;
}

int int_mod(int a, int b) {
  if (b == 0 || b == -1) return 0;
  int r = a - (a / b) * b;
  return OP == F_MOD && r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

uint int_result(int a, int b) {
  switch (OP) {
    case F_ABS: return uint(a < 0 ? sub_int(0, a, EXACT) : a);
    case F_NEG: return uint(sub_int(0, a, EXACT));
    case F_SIGN: return uint(sign(a));
    case F_RELU: return uint(max(a, 0));
    case F_BIT_NOT: return uint(~a);
    case F_ADD: return uint(add_int(a, b, EXACT));
    case F_SUB: return uint(sub_int(a, b, EXACT));
    case F_MUL: return uint(mul_int(a, b, EXACT));
    case F_DIV: return uint(div_int(a, b, EXACT));
    case F_POW: return uint(int_pow(a, b));
    case F_MAX: return uint(max(a, b));
    case F_MIN: return uint(min(a, b));
    case F_MOD: return uint(int_mod(a, b));
    case F_FMOD: return uint(int_mod(a, b));
    case F_AND: return uint(a & b);
    case F_OR: return uint(a | b);
    case F_XOR: return uint(a ^ b);
    case F_SHIFT_LEFT: return b < 0 || b > 31 ? 0u : uint(a << b);
    case F_SHIFT_RIGHT: return b < 0 ? (a < 0 ? ~0u : 0u) : uint(a >> min(b, 31));
    default: return uint(a);
  }
}

uint uint_pow(uint a, uint b) {
  uint r = 1u;
  bool more = b > 0u;
  while (more) {
    if ((b & 1u) != 0u) r = mul_uint(r, a, EXACT);
    b >>= 1;
    more = b > 0u;
    if (more) a = mul_uint(a, a, EXACT);
  }
  return r;
}

uint uint_result(uint a, uint b) {
  switch (OP) {
    case F_SIGN: return a > 0u ? 1u : 0u;
    case F_NOT: return a == 0u ? 1u : 0u;
    case F_BIT_NOT:
      if (EXACT) report(STATUS_RANGE);
      return ~a;
    case F_ADD: return add_uint(a, b, EXACT);
    case F_SUB:
      if (EXACT && a < b) report(STATUS_RANGE);
      return a - b;
    case F_MUL: return mul_uint(a, b, EXACT);
    case F_DIV: return b == 0u ? 0u : a / b;
    case F_POW: return uint_pow(a, b);
    case F_MAX: return max(a, b);
    case F_MIN: return min(a, b);
    case F_MOD: return b == 0u ? 0u : a % b;
    case F_FMOD: return b == 0u ? 0u : a % b;
    case F_AND: return a & b;
    case F_OR: return a | b;
    case F_XOR: return a ^ b;
    case F_SHIFT_LEFT:
      if (EXACT && b > 0u && a != 0u && (b > 31u || (a >> (32u - b)) != 0u)) report(STATUS_RANGE);
      return b > 31u ? 0u : a << b;
    case F_SHIFT_RIGHT: return b > 31u ? 0u : a >> b;
    default: return a;
  }
}

bool compared(uint a, uint b) {
  bool equal, less;
  if (KIND == KIND_FLOAT) {
    float x = uintBitsToFloat(a), y = uintBitsToFloat(b);
    if (nan_word(a) || nan_word(b)) return false;
    equal = x == y;
    less = x < y;
  } else {
    equal = a == b;
    less = KIND == KIND_INT ? int(a) < int(b) : a < b;
  }
  if (OP == F_EQUAL) return equal;
  if (OP == F_LESS) return less;
  if (OP == F_LESS_EQUAL) return less || equal;
  if (OP == F_GREATER) return !less && !equal;
  return !less;
}

uint converted(uint w) {
  if (TYPE <= T_BFLOAT16) {
    float v = uintBitsToFloat(w);
    if (KIND == KIND_INT) v = float(int(w));
    if (KIND == KIND_UINT) v = float(w);
    if (TYPE == T_FLOAT16) v = half_of(v);
    if (TYPE == T_BFLOAT16) v = bfloat_of(v);
    return floatBitsToUint(v);
  }
  if (TYPE == T_BOOL) {
    return (KIND == KIND_FLOAT ? (w & 0x7fffffffu) != 0u : w != 0u) ? 1u : 0u;
  }
  bool to_signed = TYPE >= T_INT64 && TYPE <= T_INT8;
  if (KIND == KIND_FLOAT) {
    float v = uintBitsToFloat(w);
    bool fits = to_signed ? v >= -2147483648.0 && v < 2147483648.0 : v > -1.0 && v < 4294967296.0;
    if (EXACT && !fits) report(STATUS_RANGE);
    if (to_signed || v < 0.0) return wrapped(uint(int(clamp(v, -2147483648.0, 2147483520.0))), TYPE);
    return wrapped(uint(clamp(v, 0.0, 4294967040.0)), TYPE);
  }
  if (EXACT && int(w) < 0 && (KIND == KIND_INT) != to_signed) report(STATUS_RANGE);
  return wrapped(w, TYPE);
}

uint computed(uint a, uint b, uint c) {
  if (OP == F_WHERE) return a != 0u ? b : c;
  if (OP == F_IDENTITY) return a;
  if (OP == F_CAST) return converted(a);
  if (OP == F_IS_NAN) return nan_word(a) ? 1u : 0u;
  if (OP == F_IS_INF) {
    return inf_word(a) && ((a >> 31) != 0u ? p.x != 0.0 : p.y != 0.0) ? 1u : 0u;
  }
  if (OP >= F_EQUAL && OP <= F_GREATER_EQUAL) return compared(a, b) ? 1u : 0u;
  if (KIND == KIND_FLOAT) {
    float v;
    if (OPERANDS == 1u) v = float_unary(uintBitsToFloat(a));
    else v = float_binary(uintBitsToFloat(a), uintBitsToFloat(b));
    return floatBitsToUint(v);
  }
  return wrapped(KIND == KIND_INT ? int_result(int(a), int(b)) : uint_result(a, b), TYPE);
}

void main() {
  uint i = element();
  if (i >= p.count) return;
  uvec3 at = uvec3(i);
  if (!PLAIN) {
    at = uvec3(0u);
    uint rest = i;
    for (uint d = load_word(p.table, 0u); d > 0u; d--) {
      uint dim = load_word(p.table, d);
      uint here = rest % dim;
      rest /= dim;
      at.x += here * load_word(p.table, RANK + d);
      if (OPERANDS > 1u) at.y += here * load_word(p.table, 2u * RANK + d);
      if (OPERANDS > 2u) at.z += here * load_word(p.table, 3u * RANK + d);
    }
  }
  uint a = load_word(p.a, at.x), b = 0u, c = 0u;
  if (OPERANDS > 1u) b = load_word(p.b, at.y);
  if (OPERANDS > 2u) c = load_word(p.c, at.z);
  store_word(p.result, i, computed(a, b, c));
}
