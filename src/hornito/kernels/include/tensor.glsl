// What the kernels of generic tensor ops share: the push block, the operands' kinds, exact integers.
//
// Every element is a 32-bit word: fp32 for all float types, int for the signed, uint for the
// unsigned integers, 0 or 1 for bool. A 64-bit integer type whose value leaves 32 bits sets the
// node's word in `status` to STATUS_RANGE; the host reads it and refuses the result.
#ifndef HORNITO_TENSOR
#define HORNITO_TENSOR

#include "memory.glsl"

layout(push_constant) uniform Push {
  Words a;
  Words b;
  Words c;
  Words result;
  Words table;
  Words status;
  uint count;
  uint node;
  uint p0;
  uint p1;
  uint p2;
  uint p3;
  float x;
  float y;
} p;

const uint KIND_FLOAT = 0u;
const uint KIND_INT = 1u;
const uint KIND_UINT = 2u;

const uint STATUS_RANGE = 1u;
const uint STATUS_INDEX = 2u;

const uint T_FLOAT32 = 0u;
const uint T_FLOAT16 = 1u;
const uint T_BFLOAT16 = 2u;
const uint T_INT64 = 3u;
const uint T_INT32 = 4u;
const uint T_INT16 = 5u;
const uint T_INT8 = 6u;
const uint T_UINT64 = 7u;
const uint T_UINT32 = 8u;
const uint T_UINT16 = 9u;
const uint T_UINT8 = 10u;
const uint T_BOOL = 11u;

const uint RANK = 8u;

const uint THREADS = 64u;  // of every workgroup

// The element of this thread; grids are two-dimensional when one row of workgroups is too short.
uint element() {
  uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
  return group * THREADS + gl_LocalInvocationIndex;
}

uint this_row() { return gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x; }

void report(uint what) { store_word(p.status, p.node, what); }

bool nan_word(uint w) { return (w & 0x7fffffffu) > 0x7f800000u; }
bool inf_word(uint w) { return (w & 0x7fffffffu) == 0x7f800000u; }
bool is_nan(float v) { return nan_word(floatBitsToUint(v)); }

const uint NAN = 0x7fc00000u;
const uint INFINITY = 0x7f800000u;

// The word as a number of the type, for those with fewer than 32 bits: integers wrap.
uint wrapped(uint w, uint type) {
  if (type == T_INT16) return uint(bitfieldExtract(int(w), 0, 16));
  if (type == T_INT8) return uint(bitfieldExtract(int(w), 0, 8));
  if (type == T_UINT16) return w & 0xffffu;
  if (type == T_UINT8) return w & 0xffu;
  if (type == T_BOOL) return w != 0u ? 1u : 0u;
  return w;
}

int add_int(int a, int b, bool exact) {
  int r = a + b;
  if (exact && ((a ^ r) & (b ^ r)) < 0) report(STATUS_RANGE);
  return r;
}

int sub_int(int a, int b, bool exact) {
  int r = a - b;
  if (exact && ((a ^ b) & (a ^ r)) < 0) report(STATUS_RANGE);
  return r;
}

int mul_int(int a, int b, bool exact) {
  int high, low;
  imulExtended(a, b, high, low);
  if (exact && high != (low >> 31)) report(STATUS_RANGE);
  return low;
}

// Rounded to zero; by zero gives zero.
int div_int(int a, int b, bool exact) {
  if (b == 0) return 0;
  if (b == -1) return sub_int(0, a, exact);
  return a / b;
}

uint add_uint(uint a, uint b, bool exact) {
  uint carry;
  uint r = uaddCarry(a, b, carry);
  if (exact && carry != 0u) report(STATUS_RANGE);
  return r;
}

uint mul_uint(uint a, uint b, bool exact) {
  uint high, low;
  umulExtended(a, b, high, low);
  if (exact && high != 0u) report(STATUS_RANGE);
  return low;
}

float max_float(float a, float b) { return is_nan(a) || a > b ? a : b; }
float min_float(float a, float b) { return is_nan(a) || a < b ? a : b; }

#endif
