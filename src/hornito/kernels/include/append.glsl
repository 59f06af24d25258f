// What the kernels share that go from a row of x to q and the cache: the push block, and the end of two
// neighbouring pairs of dims that turn together. Dims past R make pairs among themselves. R/2 and D/2 are
// even.
// Push: addresses of the row records, block table, x [T, K], weight, bias, norm weight [K], inv_freq
// [R/2] (or anything with R/2 = 0), q out [T, heads, D]; table stride, layer, heads, kv_heads, D, R/2, K,
// rows of the bucket, scale of sine and cosine, eps.
#ifndef HORNITO_APPEND
#define HORNITO_APPEND

#include "kv.glsl"
#include "rope.glsl"
#include "values.glsl"
#include "weights.glsl"

layout(constant_id = 0) const uint BIAS = 0u;

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats x;
  Words w;
  Floats bias;
  Floats norm;
  Floats inv_freq;
  Floats q;
  uint table_stride;
  uint layer;
  uint heads;
  uint kv_heads;
  uint head_dim;
  uint half_dim;
  uint k;
  uint count;
  float scale;
  float eps;
} p;

// The first dim of pair i of a head.
uint first_dim(uint i) { return i < p.half_dim ? i : p.half_dim + i; }

// A pair of dims: its head, its first dim, and how far behind it the other one is.
struct Pair {
  uint head;
  uint i;
  uint partner;
};

uint all_pairs() { return (p.heads + 2u * p.kv_heads) * (p.head_dim / 2u); }

Pair pair_at(uint index) {
  uint pairs = p.head_dim / 2u;
  index = min(index, all_pairs() - 1u);
  uint i = first_dim(index % pairs);
  return Pair(index / pairs, i, i < p.half_dim ? p.half_dim : pairs - p.half_dim);
}

// The weight rows of a pair.
uvec2 pair_rows(uint index) {
  Pair pair = pair_at(index);
  uint row = pair.head * p.head_dim + pair.i;
  return uvec2(row, row + pair.partner);
}

// Where a row's keys and values go.
Words row_block(Row row) {
  return Words(kv_block(p.table, p.table_stride, row.slot, row.position));
}

// Ends pairs `index`, which is even, and index + 1 in row r from the sums of their first and second dims:
// bias, rotation, stores. `block` is the row's in the cache.
void end_pairs(uint r, uint position, Words block, uint index, vec2 lo, vec2 hi) {
  if (index >= all_pairs()) return;
  Pair pair = pair_at(index);
  uint head = pair.head;
  uint i = pair.i;
  uint partner = pair.partner;
  if (BIAS == 1u) {
    uint at = head * p.head_dim + i;
    lo += vec2(load_float(p.bias, at), load_float(p.bias, at + 1u));
    hi += vec2(load_float(p.bias, at + partner), load_float(p.bias, at + partner + 1u));
  }
  if (i < p.half_dim && head < p.heads + p.kv_heads) {
    vec2 t0 = sin_cos(float(position) * load_float(p.inv_freq, i)) * p.scale;
    vec2 t1 = sin_cos(float(position) * load_float(p.inv_freq, i + 1u)) * p.scale;
    vec2 s = vec2(t0.x, t1.x);
    vec2 c = vec2(t0.y, t1.y);
    vec2 a = lo;
    lo = a * c - hi * s;
    hi = hi * c + a * s;
  }
  if (head < p.heads) {
    uint to = (r * p.heads + head) * p.head_dim + i;
    store_value2(p.q, to, lo);
    store_value2(p.q, to + partner, hi);
    return;
  }
  uint side = head >= p.heads + p.kv_heads ? 1u : 0u;
  uint kv_head = head - p.heads - side * p.kv_heads;
  uint to = kv_index(p.layer, side, kv_head, p.kv_heads, position, p.head_dim) + i;
  store_kv2(block, to, lo.x, lo.y);
  store_kv2(block, to + partner, hi.x, hi.y);
}

// The matrix [q; k; v].
Matrix matrix() { return Matrix(p.w, (p.heads + 2u * p.kv_heads) * p.head_dim, p.k); }

#endif
