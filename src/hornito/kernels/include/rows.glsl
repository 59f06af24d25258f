// The row records of a call: which token, where, for which slot. Two 16-byte parts per row:
// {token, position, slot, flags} and {limit, emitted, ring, free}.
#ifndef HORNITO_ROWS
#define HORNITO_ROWS

#include "memory.glsl"

const uint ROW_LIVE = 1u;
const uint ROW_IGNORE_EOS = 2u;
const uint ROW_EMBEDDED = 4u;
const uint KV_BLOCK = 64u;

struct Row {
  uint token;
  uint position;
  uint slot;
  bool live;
  bool embedded;
};

Row load_row(Words rows, uint r) {
  uvec4 w = load_words4(rows, 2u * r);
  return Row(w.x, w.y, w.z, (w.w & ROW_LIVE) != 0u, (w.w & ROW_EMBEDDED) != 0u);
}

// Address of a KV block: `table` has `stride` entries per slot.
uvec2 kv_block(Addresses table, uint stride, uint slot, uint position) {
  return load_address(table, slot * stride + position / KV_BLOCK);
}

#endif
