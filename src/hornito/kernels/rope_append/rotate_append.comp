// From one fused row [q; k; v]: rotates q into its own buffer, rotates k and writes it, with v, into
// the slot's KV block. Twin of rope (twice) and kv_append; the same arithmetic.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 64 threads, each two neighbouring dims i, i + 1 of a head and their partners in the
// other half (the partner of a dim past R is none); x covers (heads + 2 kv_heads) * items, y rows.
// R/2 and D are even.
// Push: addresses of the row records, block table, qkv [T, (heads + 2 kv_heads) * D], inv_freq
// [R/2] (or anything with R/2 = 0: no rotation), q out [T, heads, D]; table stride, layer, heads,
// kv_heads, D, R/2, scale.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "kv.glsl"
#include "rope.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats qkv;
  Floats inv_freq;
  Floats q;
  uint table_stride;
  uint layer;
  uint heads;
  uint kv_heads;
  uint head_dim;
  uint half_dim;
  float scale;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  Row row = load_row(p.rows, r);
  // Pairs of dims per head: those that turn stand for two pairs, those past R for one.
  uint turning = p.half_dim / 2u;
  uint pairs = turning + (p.head_dim - 2u * p.half_dim) / 2u;
  uint item = gl_GlobalInvocationID.x;
  uint all_heads = p.heads + 2u * p.kv_heads;
  if (!row.live || item >= all_heads * pairs) return;
  uint head = item / pairs;
  uint pair = item % pairs;
  uint from = (r * all_heads + head) * p.head_dim;

  bool turn = pair < turning;
  uint i = turn ? 2u * pair : 2u * p.half_dim + 2u * (pair - turning);
  uint j = turn ? i + p.half_dim : i;
  vec2 lo = vec2(load_value(p.qkv, from + i), load_value(p.qkv, from + i + 1u));
  vec2 hi = vec2(load_value(p.qkv, from + j), load_value(p.qkv, from + j + 1u));
  if (turn && head < p.heads + p.kv_heads) {
    vec2 t0 = sin_cos(float(row.position) * load_float(p.inv_freq, i)) * p.scale;
    vec2 t1 = sin_cos(float(row.position) * load_float(p.inv_freq, i + 1u)) * p.scale;
    vec2 s = vec2(t0.x, t1.x);
    vec2 c = vec2(t0.y, t1.y);
    vec2 a = lo;
    lo = a * c - hi * s;
    hi = hi * c + a * s;
  }
  if (head < p.heads) {
    uint to = (r * p.heads + head) * p.head_dim;
    store_value2(p.q, to + i, lo);
    store_value2(p.q, to + j, hi);
    return;
  }
  uint kv_head = head - p.heads;
  uint side = kv_head >= p.kv_heads ? 1u : 0u;
  kv_head -= side * p.kv_heads;
  Words block = Words(kv_block(p.table, p.table_stride, row.slot, row.position));
  uint to = kv_index(p.layer, side, kv_head, p.kv_heads, row.position, p.head_dim);
  store_kv2(block, to + i, lo.x, lo.y);
  store_kv2(block, to + j, hi.x, hi.y);
}
