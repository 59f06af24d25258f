// The end of a step, for the kernels that choose a row's next token: the record for the host and, with
// UPDATE, the row's token, position and flags for the next step. The including kernel's push block has
// rows, eos, eos_count, records and ring.
//
// Records, 16 bytes each, at [s, emitted % ring]: token, log-probability, emitted + 1 (a sequence
// number), flags. A token of NOT_A_NUMBER says that the logits hold a NaN or an infinity.
#ifndef HORNITO_STEP
#define HORNITO_STEP

#include "rows.glsl"

const uint NOT_A_NUMBER = 0xfffffffeu;

// `row` and `more` are the two parts of row record r; s is the selected row.
void finish_step(uint s, uint r, uvec4 row, uvec4 more, uint token, float logprob) {
  uint flags = row.w;
  if (UPDATE == 1u) {
    bool stop = row.y + 1u >= more.x || token == NOT_A_NUMBER;
    if ((flags & ROW_IGNORE_EOS) == 0u) {
      for (uint i = 0u; i < p.eos_count; ++i) stop = stop || load_word(p.eos, i) == token;
    }
    if (stop) flags &= ~ROW_LIVE;
    store_word(p.rows, 8u * r, token);
    store_word(p.rows, 8u * r + 1u, row.y + 1u);
    store_word(p.rows, 8u * r + 3u, flags);
    store_word(p.rows, 8u * r + 5u, more.y + 1u);
  }
  uint at = (s * p.ring + more.y % p.ring) * 4u;
  store_word(p.records, at, token);
  store_word(p.records, at + 1u, floatBitsToUint(logprob));
  store_word(p.records, at + 2u, more.y + 1u);
  store_word(p.records, at + 3u, flags);
}

#endif
