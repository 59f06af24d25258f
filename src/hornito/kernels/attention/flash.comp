// Attention of a chunk of rows of one slot at contiguous positions, flash style: a tile of ROWS query
// rows of one head walks the KV blocks once with a running maximum and sum. Masked keys and values
// are never loaded; rows that are not live are not stored.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 64 threads: thread = key while scoring, thread = dim while summing values; x = row
// tiles, y = heads.
// Shared: q [ROWS, D] <= 2048 floats, scores [ROWS, 64]; ROWS <= 16.
// Push: addresses of the row records, block table, q [T, heads, D], out [T, heads, D], the call
// header {live rows}; table stride, layer, window (0 none), scale, softcap (0 none).
// Specialisation: 0 ROWS, 1 D, 2 kv_heads, 3 group (heads / kv_heads).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "attention.glsl"
#include "values.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint ROWS = 16u;
layout(constant_id = 1) const uint D = 64u;
layout(constant_id = 2) const uint KV_HEADS = 1u;
layout(constant_id = 3) const uint GROUP = 1u;

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats q;
  Floats result;
  Words call;
  uint table_stride;
  uint layer;
  uint window;
  float scale;
  float softcap;
} p;

shared float q_tile[2048];
shared float score[16 * 64];
shared float part[16 * 4];
shared float best[16];
shared float keep[16];
shared float sum[16];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint head = gl_WorkGroupID.y;
  uint live = load_word(p.call, 0u);
  uint row0 = gl_WorkGroupID.x * ROWS;
  if (row0 >= live) return;
  uint rows = min(ROWS, live - row0);
  Row first = load_row(p.rows, row0);
  uint heads = KV_HEADS * GROUP;
  for (uint i = t; i < ROWS * D; i += 64u) {
    uint r = i / D;
    q_tile[i] = r < rows ? load_value(p.q, ((row0 + r) * heads + head) * D + i % D) * p.scale : 0.0;
  }
  if (t < ROWS) {
    best[t] = MASKED;
    sum[t] = 0.0;
  }
  float value[16][4];
  for (uint r = 0u; r < ROWS; ++r) {
    for (uint e = 0u; e < 4u; ++e) value[r][e] = 0.0;
  }

  uint last_position = first.position + rows - 1u;
  uint seen_from = first_seen(first.position, p.window);
  for (uint b = seen_from / KV_BLOCK; b <= last_position / KV_BLOCK; ++b) {
    Words block = Words(kv_block(p.table, p.table_stride, first.slot, b * KV_BLOCK));
    uint key = b * KV_BLOCK + t;
    float dots[16];
    for (uint r = 0u; r < ROWS; ++r) dots[r] = 0.0;
    barrier();
    if (key <= last_position && key >= seen_from) {
      uint at = kv_index(p.layer, 0u, head / GROUP, KV_HEADS, t, D);
      // Unrolled, this loop costs LLVM drivers 15 s of compiling and gains nothing.
      [[dont_unroll]] for (uint d = 0u; d < D; d += 4u) {
        vec4 k = load_kv4(block, at + d);
        for (uint r = 0u; r < ROWS; ++r) {
          uint j = r * D + d;
          dots[r] += q_tile[j] * k.x + q_tile[j + 1u] * k.y + q_tile[j + 2u] * k.z +
                     q_tile[j + 3u] * k.w;
        }
      }
    }
    for (uint r = 0u; r < ROWS; ++r) {
      uint position = first.position + r;
      bool seen = r < rows && key <= position && key >= first_seen(position, p.window);
      float v = dots[r];
      if (p.softcap > 0.0) v = p.softcap * tanh(clamp(v / p.softcap, -15.0, 15.0));
      score[r * 64u + t] = seen ? v : MASKED;
    }
    barrier();
    // Four threads a row, sixteen keys each.
    uint quarter_row = t / 4u;
    uint quarter = quarter_row * 64u + (t % 4u) * 16u;
    if (quarter_row < ROWS) {
      float m = MASKED;
      for (uint j = 0u; j < 16u; ++j) m = max(m, score[quarter + j]);
      part[t] = m;
    }
    barrier();
    if (t < ROWS) {
      float now = max(max(part[4u * t], part[4u * t + 1u]), max(part[4u * t + 2u], part[4u * t + 3u]));
      now = max(now, best[t]);
      keep[t] = exp(best[t] - now);
      best[t] = now;
    }
    barrier();
    if (quarter_row < ROWS) {
      float now = best[quarter_row];
      float added = 0.0;
      for (uint j = 0u; j < 16u; ++j) {
        float v = score[quarter + j];
        v = v == MASKED ? 0.0 : exp(v - now);
        score[quarter + j] = v;
        added += v;
      }
      part[t] = added;
    }
    barrier();
    if (t < ROWS) {
      sum[t] = sum[t] * keep[t] + ((part[4u * t] + part[4u * t + 1u]) +
                                   (part[4u * t + 2u] + part[4u * t + 3u]));
    }
    for (uint r = 0u; r < ROWS; ++r) {
      for (uint e = 0u; e < 4u; ++e) value[r][e] *= keep[r];
    }
    uint first_key = max(seen_from, b * KV_BLOCK) - b * KV_BLOCK;
    uint last_key = min(last_position, b * KV_BLOCK + KV_BLOCK - 1u) - b * KV_BLOCK;
    for (uint j = first_key; j <= last_key; ++j) {
      uint at = kv_index(p.layer, 1u, head / GROUP, KV_HEADS, j, D);
      for (uint e = 0u; e < (D + 63u) / 64u; ++e) {
        uint d = e * 64u + t;
        if (d < D) {
          float v = load_kv(block, at + d);
          for (uint r = 0u; r < ROWS; ++r) value[r][e] += score[r * 64u + j] * v;
        }
      }
    }
  }
  barrier();
  for (uint r = 0u; r < rows; ++r) {
    for (uint e = 0u; e < (D + 63u) / 64u; ++e) {
      uint d = e * 64u + t;
      if (d < D) store_value(p.result, ((row0 + r) * heads + head) * D + d, value[r][e] / sum[r]);
    }
  }
}
