// From few rows of x to q and the cache: the projections of q, k and v (one matrix [q; k; v]), behind a
// norm of x if there is one, with bias, RoPE on q and k, q into its own buffer, k and v into the slot's
// KV block. Twin of rms_norm, gemv.comp and rotate_append.comp.
//
// variant: kv32_f32
// variant: kv32_f16 WEIGHT_F16
// variant: kv32_q WEIGHT_Q
// variant: kv32_d WEIGHT_Q DIGITS
// variant: kv16_d KV_F16 WEIGHT_Q DIGITS
// variant: kv16_f32 KV_F16
// variant: kv16_f16 KV_F16 WEIGHT_F16
// variant: kv16_q KV_F16 WEIGHT_Q
//
// Geometry: 128 threads = LANES x (128 / LANES) groups of OUTS / 2 pairs of dims that turn together (x
// covers all heads' pairs, of d with any number of workgroups); ROWS rows of x a workgroup (y). Dims past
// R make pairs among themselves. R/2 and D/2 are even.
// Push: addresses of the row records, block table, x [T, K], weight, bias, norm weight [K], inv_freq
// [R/2] (or anything with R/2 = 0), q out [T, heads, D]; table stride, layer, heads, kv_heads, D, R/2, K,
// rows of the bucket, scale of sine and cosine, eps.
// Specialisation: 0 BIAS, 3 ROWS (1 to 4), 4 WIDE, 5 LANES (a power of two, 8 to 64), 7 FORMAT, 8 GROUP,
// 9 OUTLIERS, 10 NORM, 11 OUTS (2, 4 or 8; 8 where ROWS is 1), of d 13 UNITS (gemv_digits.glsl).
// Requires: of d integer dot products; ROWS is 1 (gemv_digits.glsl).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef DIGITS
#extension GL_EXT_spirv_intrinsics : require
#endif
#include "gemv.glsl"
#include "kv.glsl"
#include "rope.glsl"
#include "values.glsl"

layout(local_size_x = 128) in;
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

// Ends the sums `lo` and `hi` of two neighbouring dims from i on of a head, and of their partners, in row
// r: bias, rotation, stores.
void store_pairs(uint r, uint head, uint i, uint partner, vec2 lo, vec2 hi) {
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  if (BIAS == 1u) {
    uint at = head * p.head_dim + i;
    lo += vec2(load_float(p.bias, at), load_float(p.bias, at + 1u));
    hi += vec2(load_float(p.bias, at + partner), load_float(p.bias, at + partner + 1u));
  }
  if (i < p.half_dim && head < p.heads + p.kv_heads) {
    vec2 t0 = sin_cos(float(row.position) * load_float(p.inv_freq, i)) * p.scale;
    vec2 t1 = sin_cos(float(row.position) * load_float(p.inv_freq, i + 1u)) * p.scale;
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
  Words block = Words(kv_block(p.table, p.table_stride, row.slot, row.position));
  uint kv_head = head - p.heads - side * p.kv_heads;
  uint to = kv_index(p.layer, side, kv_head, p.kv_heads, row.position, p.head_dim) + i;
  store_kv2(block, to, lo.x, lo.y);
  store_kv2(block, to + partner, hi.x, hi.y);
}

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

// The first pair that this thread's group has of a tile.
uint first_pair(uint tile) {
  return (tile * (128u / LANES) + gl_LocalInvocationID.x / LANES) * (OUTS / 2u);
}

void tile_rows(uint tile, out uint rows[8]) {
  uint first = first_pair(tile);
  [[unroll]] for (uint j = 0u; j < OUTS / 2u; ++j) {
    Pair pair = pair_at(first + j);
    rows[2u * j] = pair.head * p.head_dim + pair.i;
    rows[2u * j + 1u] = rows[2u * j] + pair.partner;
  }
}

// Neighbouring pairs, which share words of the cache, are stored by one thread: those of two groups where
// a group has one.
void tile_end(uint tile, uint r) {
  uint t = gl_LocalInvocationID.x;
  uint lane = t % LANES;
  uint first = t - lane;
  uint pair = first_pair(tile) + 2u * lane;
  bool stores = OUTS == 2u ? t % (2u * LANES) == 0u : lane < OUTS / 4u;
  if (!stores || r >= p.count || pair >= all_pairs()) return;
  uint a = OUTS == 2u ? first : lane * 512u + first;
  uint b = OUTS == 2u ? first + LANES : a + 256u;
  float factor = norm_factor(first, p.k, p.eps);
  vec2 lo = vec2(tree[a], tree[b]) * factor;
  vec2 hi = vec2(tree[a + 128u], tree[b + 128u]) * factor;
  Pair at = pair_at(pair);
  store_pairs(r, at.head, at.i, at.partner, lo, hi);
}

void main() {
  uint heads = p.heads + 2u * p.kv_heads;
  uint pairs = 128u / LANES * (OUTS / 2u);
  run_tiles(p.x, p.norm, Matrix(p.w, heads * p.head_dim, p.k), (all_pairs() + pairs - 1u) / pairs);
}
