// Stores into KV blocks: [layer][K, V][kv_head][64][head_dim], in fp32 or (KV_F16) fp16.
#ifndef HORNITO_KV
#define HORNITO_KV

#include "rows.glsl"

#ifdef KV_F16
const uint KV_BYTES = 2u;
vec4 load_kv4(Words base, uint i) {
  uint w = i >> 1;
  return vec4(unpackHalf2x16(load_word(base, w)), unpackHalf2x16(load_word(base, w + 1u)));
}
float load_kv(Words base, uint i) { return load_half(base, i); }
// Elements i and i + 1; i is even.
void store_kv2(Words base, uint i, float a, float b) { store_word(base, i >> 1, pack_halves(a, b)); }
#else
const uint KV_BYTES = 4u;
vec4 load_kv4(Words base, uint i) { return uintBitsToFloat(load_words4(base, i >> 2)); }
float load_kv(Words base, uint i) { return uintBitsToFloat(load_word(base, i)); }
void store_kv2(Words base, uint i, float a, float b) {
  store_word(base, i, floatBitsToUint(a));
  store_word(base, i + 1u, floatBitsToUint(b));
}
#endif

// Element index, in a block, of dim 0 of one position. `side` is 0 for keys, 1 for values.
uint kv_index(uint layer, uint side, uint head, uint kv_heads, uint position, uint head_dim) {
  return (((layer * 2u + side) * kv_heads + head) * KV_BLOCK + position % KV_BLOCK) * head_dim;
}

#endif
