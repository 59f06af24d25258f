// Unsigned 64-bit integers as uvec2 {low, high}, for devices without shaderInt64.
#ifndef HORNITO_WIDE
#define HORNITO_WIDE

uvec2 add64(uvec2 a, uvec2 b) {
  uint carry;
  uint low = uaddCarry(a.x, b.x, carry);
  return uvec2(low, a.y + b.y + carry);
}

uvec2 add64(uvec2 a, uint b) { return add64(a, uvec2(b, 0u)); }

// a - b, where b <= a.
uvec2 sub64(uvec2 a, uvec2 b) {
  uint borrow;
  uint low = usubBorrow(a.x, b.x, borrow);
  return uvec2(low, a.y - b.y - borrow);
}

bool less64(uvec2 a, uvec2 b) { return a.y < b.y || (a.y == b.y && a.x < b.x); }

// a * b, where the product fits.
uvec2 times64(uint a, uint b) {
  uint high, low;
  umulExtended(a, b, high, low);
  return uvec2(low, high);
}

// The 96-bit product of a 64-bit and a 32-bit number, shifted right by 32; it must fit 64 bits.
uvec2 scale32(uvec2 a, uint b) { return add64(times64(a.y, b), times64(a.x, b).y); }

// The high half of the 128-bit product, rounded down.
uvec2 scale64(uvec2 a, uvec2 b) {
  uvec2 low = times64(a.x, b.y);
  uvec2 rest = scale32(a, b.x);
  uint carry;
  uaddCarry(low.x, rest.x, carry);
  return add64(add64(times64(a.y, b.y), low.y), add64(uvec2(rest.y, 0u), carry));
}

#endif
