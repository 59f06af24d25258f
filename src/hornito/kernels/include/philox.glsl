// Philox4x32-10, a counter-based generator: 128 random bits from a counter and a key, without state.
// Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
#ifndef HORNITO_PHILOX
#define HORNITO_PHILOX

uvec4 philox(uvec4 counter, uvec2 key) {
  for (uint i = 0u; i < 10u; ++i) {
    uint high0, low0, high1, low1;
    umulExtended(0xD2511F53u, counter.x, high0, low0);
    umulExtended(0xCD9E8D57u, counter.z, high1, low1);
    counter = uvec4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key += uvec2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter;
}

#endif
