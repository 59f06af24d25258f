// What the attention kernels share: which keys a row may see and how they are cut into splits.
#ifndef HORNITO_ATTENTION
#define HORNITO_ATTENTION

#include "kv.glsl"

// A finite stand-in for minus infinity: differences of two such scores stay finite.
const float MASKED = -1.0e30;

// First position that a row at `position` sees; `window` counts the row itself, 0 means all.
uint first_seen(uint position, uint window) {
  return (window == 0u || position < window) ? 0u : position - window + 1u;
}

// Keys of one row cut into runs of whole blocks, at most `most` of them; a few blocks are not cut, since
// joining takes longer. It depends on the row's position alone, so that the bits do not depend on who
// else runs.
const uint UNCUT_BLOCKS = 3u;

struct Splits {
  uint first_block;
  uint blocks;
  uint per_split;
  uint count;
};

Splits split_keys(uint position, uint window, uint most) {
  Splits s;
  s.first_block = first_seen(position, window) / KV_BLOCK;
  s.blocks = position / KV_BLOCK - s.first_block + 1u;
  s.per_split = s.blocks <= UNCUT_BLOCKS ? s.blocks : (s.blocks + most - 1u) / most;
  s.count = (s.blocks + s.per_split - 1u) / s.per_split;
  return s;
}

#endif
