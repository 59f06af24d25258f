// Writes the keys and values of every live row into its slot's KV block. Rows that are not live write
// nothing.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 64 threads, two elements of K and of V each; x covers kv_heads * D / 2, y rows.
// Push: addresses of the row records, block table, k and v [T, kv_heads, D]; table stride,
// layer, kv_heads, D.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "kv.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats k;
  Floats v;
  uint table_stride;
  uint layer;
  uint kv_heads;
  uint head_dim;
} p;

void main() {
  uint r = gl_WorkGroupID.y;
  Row row = load_row(p.rows, r);
  uint width = p.kv_heads * p.head_dim;
  uint e = 2u * gl_GlobalInvocationID.x;
  if (!row.live || e >= width) return;
  Words block = Words(kv_block(p.table, p.table_stride, row.slot, row.position));
  uint head = e / p.head_dim;
  uint d = e % p.head_dim;
  uint key = kv_index(p.layer, 0u, head, p.kv_heads, row.position, p.head_dim) + d;
  uint value = kv_index(p.layer, 1u, head, p.kv_heads, row.position, p.head_dim) + d;
  uint at = r * width + e;
  store_kv2(block, key, load_value(p.k, at), load_value(p.k, at + 1u));
  store_kv2(block, value, load_value(p.v, at), load_value(p.v, at + 1u));
}
