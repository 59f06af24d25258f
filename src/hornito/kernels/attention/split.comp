// Attention of single rows over the block-tabled cache, keys split into runs of whole blocks. Every
// workgroup takes the query heads of (a part of) one KV head's group, one split of one row, and
// writes an unnormalised partial result with its maximum and sum; merge.comp joins them.
// Masked keys and values are never loaded.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 64 threads: thread = key while scoring, thread = dim while summing values; x = splits,
// y = kv_heads * (group / HEADS), z = rows.
// Shared: q [HEADS, D] <= 2048 floats, p [HEADS, 64]; HEADS <= 8, D a multiple of 4 up to 256.
// Push: addresses of the row records, block table, q [T, heads, D], partial out
// [T, heads, splits, D], stats out [T, heads, splits, 2] (max, sum); table stride, layer, window
// (0 none), scale, softcap (0 none).
// Specialisation: 0 HEADS a workgroup, 1 D, 2 kv_heads, 3 group (heads / kv_heads), 4 SPLITS.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "attention.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint D = 64u;
layout(constant_id = 2) const uint KV_HEADS = 1u;
layout(constant_id = 3) const uint GROUP = 1u;
layout(constant_id = 4) const uint SPLITS = 1u;

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats q;
  Floats partial;
  Floats stats;
  uint table_stride;
  uint layer;
  uint window;
  float scale;
  float softcap;
} p;

shared float q_tile[2048];
shared float score[8 * 64];
shared float reduce[8 * 64];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint split = gl_WorkGroupID.x;
  uint r = gl_WorkGroupID.z;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  Splits s = split_keys(row.position, p.window, SPLITS);
  if (split >= s.count) return;

  uint parts = GROUP / HEADS;
  uint kv_head = gl_WorkGroupID.y / parts;
  uint head0 = kv_head * GROUP + (gl_WorkGroupID.y % parts) * HEADS;
  uint q_base = (r * KV_HEADS * GROUP + head0) * D;
  for (uint i = t; i < HEADS * D; i += 64u) q_tile[i] = load_value(p.q, q_base + i) * p.scale;
  barrier();

  float best[8];
  float sum[8];
  float value[8][4];
  for (uint h = 0u; h < HEADS; ++h) {
    best[h] = MASKED;
    sum[h] = 0.0;
    for (uint e = 0u; e < 4u; ++e) value[h][e] = 0.0;
  }

  uint seen_from = first_seen(row.position, p.window);
  uint block0 = s.first_block + split * s.per_split;
  uint block_end = min(block0 + s.per_split, s.first_block + s.blocks);
  for (uint b = block0; b < block_end; ++b) {
    Words block = Words(kv_block(p.table, p.table_stride, row.slot, b * KV_BLOCK));
    uint key = b * KV_BLOCK + t;
    bool seen = key <= row.position && key >= seen_from;
    float dots[8];
    for (uint h = 0u; h < HEADS; ++h) dots[h] = 0.0;
    if (seen) {
      uint at = kv_index(p.layer, 0u, kv_head, KV_HEADS, t, D);
      // Four loads in flight; unrolled whole, this loop costs LLVM drivers 10 s of compiling.
      const uint STEP = D % 16u == 0u ? 16u : 4u;
      [[dont_unroll]] for (uint d0 = 0u; d0 < D; d0 += STEP) {
        [[unroll]] for (uint d = d0; d < d0 + STEP; d += 4u) {
          vec4 k = load_kv4(block, at + d);
          for (uint h = 0u; h < HEADS; ++h) {
            uint j = h * D + d;
            dots[h] += q_tile[j] * k.x + q_tile[j + 1u] * k.y + q_tile[j + 2u] * k.z +
                       q_tile[j + 3u] * k.w;
          }
        }
      }
    }
    for (uint h = 0u; h < HEADS; ++h) {
      float v = dots[h];
      if (p.softcap > 0.0) v = p.softcap * tanh(clamp(v / p.softcap, -15.0, 15.0));
      score[h * 64u + t] = seen ? v : MASKED;
      reduce[h * 64u + t] = score[h * 64u + t];
    }
    [[dont_unroll]] for (uint w = 32u; w > 0u; w >>= 1) {
      barrier();
      if (t < w) {
        for (uint h = 0u; h < HEADS; ++h) {
          uint j = h * 64u + t;
          reduce[j] = max(reduce[j], reduce[j + w]);
        }
      }
    }
    barrier();
    float keep[8];
    for (uint h = 0u; h < HEADS; ++h) {
      float now = max(best[h], reduce[h * 64u]);
      keep[h] = exp(best[h] - now);
      best[h] = now;
      score[h * 64u + t] = seen ? exp(score[h * 64u + t] - now) : 0.0;
    }
    barrier();
    for (uint h = 0u; h < HEADS; ++h) {
      sum[h] *= keep[h];
      for (uint e = 0u; e < 4u; ++e) value[h][e] *= keep[h];
    }
    uint first_key = max(seen_from, b * KV_BLOCK) - b * KV_BLOCK;
    uint last_key = min(row.position, b * KV_BLOCK + KV_BLOCK - 1u) - b * KV_BLOCK;
    for (uint j = first_key; j <= last_key; ++j) {
      uint at = kv_index(p.layer, 1u, kv_head, KV_HEADS, j, D);
      for (uint e = 0u; e < (D + 63u) / 64u; ++e) {
        uint d = e * 64u + t;
        if (d < D) {
          float v = load_kv(block, at + d);
          for (uint h = 0u; h < HEADS; ++h) value[h][e] += score[h * 64u + j] * v;
        }
      }
      for (uint h = 0u; h < HEADS; ++h) sum[h] += score[h * 64u + j];
    }
    barrier();
  }

  for (uint h = 0u; h < HEADS; ++h) {
    uint out_index = (r * KV_HEADS * GROUP + head0 + h) * SPLITS + split;
    for (uint e = 0u; e < (D + 63u) / 64u; ++e) {
      uint d = e * 64u + t;
      if (d < D) store_float(p.partial, out_index * D + d, value[h][e]);
    }
    if (t == 0u) {
      store_float(p.stats, out_index * 2u, best[h]);
      store_float(p.stats, out_index * 2u + 1u, sum[h]);
    }
  }
}
