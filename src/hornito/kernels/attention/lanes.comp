// Attention of single rows over the block-tabled cache, for GPUs with subgroup shuffles: LANES lanes
// share a key, so that its dims are read in one piece, and 128 / LANES keys are in flight, four deep.
// Same cut of the keys, same partial results as split.comp, which is its plain twin; merge.comp joins
// them. Masked keys and values are never loaded.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 128 threads = 128 / LANES key groups of LANES lanes; x = splits, y = kv_heads * (group /
// HEADS), z = rows.
// Requires: full subgroups of at least LANES, subgroup shuffle operations.
// Shared: one part of half the key groups' results, and their stats: HEADS <= 8, HEADS * PARTS <= 16.
// Push: see split.comp.
// Specialisation: 0 HEADS a workgroup, 1 D, 2 kv_heads, 3 group (heads / kv_heads), 4 SPLITS,
// 5 LANES (8 or 16), 6 PARTS, groups of four dims a lane: D / 4 / LANES, rounded up.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "attention.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint D = 64u;
layout(constant_id = 2) const uint KV_HEADS = 1u;
layout(constant_id = 3) const uint GROUP = 1u;
layout(constant_id = 4) const uint SPLITS = 1u;
layout(constant_id = 5) const uint LANES = 16u;
layout(constant_id = 6) const uint PARTS = 1u;

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

const uint DEEP = 4u;
shared vec4 other_value[512];
shared vec2 other_stats[64];

void main() {
  uint t = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
  uint lane = t % LANES;
  uint key_group = t / LANES;
  uint split = gl_WorkGroupID.x;
  uint r = gl_WorkGroupID.z;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  Splits s = split_keys(row.position, p.window, SPLITS);
  if (split >= s.count) return;

  uint parts = GROUP / HEADS;
  uint kv_head = gl_WorkGroupID.y / parts;
  uint head0 = kv_head * GROUP + (gl_WorkGroupID.y % parts) * HEADS;
  uint first_out = r * KV_HEADS * GROUP + head0;

  // [head * PARTS + part]; a lane's part e holds dims 4 * (lane + e * LANES) and the next three.
  vec4 q[16];
  vec4 value[16];
  float best[8];
  float sum[8];
  [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
    best[h] = MASKED;
    sum[h] = 0.0;
    [[unroll]] for (uint e = 0u; e < PARTS; ++e) {
      uint d4 = lane + e * LANES;
      q[h * PARTS + e] = d4 < D / 4u
          ? load_float4(p.q, (first_out + h) * (D / 4u) + d4) * p.scale : vec4(0.0);
      value[h * PARTS + e] = vec4(0.0);
    }
  }

  uint seen_from = first_seen(row.position, p.window);
  uint block0 = s.first_block + split * s.per_split;
  uint block_end = min(block0 + s.per_split, s.first_block + s.blocks);
  uint groups = 128u / LANES;
  for (uint b = block0; b < block_end; ++b) {
    Words block = Words(kv_block(p.table, p.table_stride, row.slot, b * KV_BLOCK));
    uint keys = kv_index(p.layer, 0u, kv_head, KV_HEADS, 0u, D);
    uint values = kv_index(p.layer, 1u, kv_head, KV_HEADS, 0u, D);
    for (uint j0 = key_group; j0 < KV_BLOCK; j0 += groups * DEEP) {
      vec4 k[DEEP * 4u];
      vec4 v[DEEP * 4u];
      bool seen[DEEP];
      [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
        uint j = j0 + u * groups;
        uint key = b * KV_BLOCK + j;
        seen[u] = j < KV_BLOCK && key <= row.position && key >= seen_from;
        [[unroll]] for (uint e = 0u; e < PARTS; ++e) {
          uint d = 4u * (lane + e * LANES);
          k[u * 4u + e] = vec4(0.0);
          v[u * 4u + e] = vec4(0.0);
          if (seen[u] && d < D) {
            k[u * 4u + e] = load_kv4(block, keys + j * D + d);
            v[u * 4u + e] = load_kv4(block, values + j * D + d);
          }
        }
      }
      // Every sum of a step at once, so that no shuffle waits for the one before.
      float score[8u * DEEP];
      [[unroll]] for (uint i = 0u; i < HEADS * DEEP; ++i) {
        score[i] = 0.0;
        [[unroll]] for (uint e = 0u; e < PARTS; ++e) {
          score[i] += dot(q[i / DEEP * PARTS + e], k[i % DEEP * 4u + e]);
        }
      }
      [[unroll]] for (uint m = LANES / 2u; m > 0u; m >>= 1) {
        [[unroll]] for (uint i = 0u; i < HEADS * DEEP; ++i) {
          score[i] += subgroupShuffleXor(score[i], m);
        }
      }
      if (p.softcap > 0.0) {
        [[unroll]] for (uint i = 0u; i < HEADS * DEEP; ++i) {
          score[i] = p.softcap * tanh(clamp(score[i] / p.softcap, -15.0, 15.0));
        }
      }
      [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        float now = best[h];
        [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
          if (!seen[u]) score[h * DEEP + u] = MASKED;
          now = max(now, score[h * DEEP + u]);
        }
        float keep = exp(best[h] - now);
        best[h] = now;
        sum[h] *= keep;
        [[unroll]] for (uint e = 0u; e < PARTS; ++e) value[h * PARTS + e] *= keep;
        [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
          float weight = seen[u] ? exp(score[h * DEEP + u] - now) : 0.0;
          sum[h] += weight;
          [[unroll]] for (uint e = 0u; e < PARTS; ++e) {
            value[h * PARTS + e] += weight * v[u * 4u + e];
          }
        }
      }
    }
  }

  // The key groups' results join in a tree; the upper half hands its own to the lower, part by part.
  for (uint w = groups / 2u; w > 0u; w >>= 1) {
    bool upper = key_group >= w && key_group < 2u * w;
    bool lower = key_group < w;
    uint pair = upper ? key_group - w : key_group;
    float mine[8];
    float theirs[8];
    [[unroll]] for (uint e = 0u; e < PARTS; ++e) {
      barrier();
      if (upper) {
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
          if (lane == 0u && e == 0u) other_stats[pair * HEADS + h] = vec2(best[h], sum[h]);
          other_value[(h * w + pair) * LANES + lane] = value[h * PARTS + e];
        }
      }
      barrier();
      if (lower) {
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
          if (e == 0u) {
            vec2 other = other_stats[pair * HEADS + h];
            float now = max(best[h], other.x);
            mine[h] = exp(best[h] - now);
            theirs[h] = exp(other.x - now);
            best[h] = now;
            sum[h] = sum[h] * mine[h] + other.y * theirs[h];
          }
          vec4 more = other_value[(h * w + pair) * LANES + lane];
          value[h * PARTS + e] = value[h * PARTS + e] * mine[h] + more * theirs[h];
        }
      }
    }
  }
  if (key_group != 0u) return;
  [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
    uint at = (first_out + h) * SPLITS + split;
    [[unroll]] for (uint e = 0u; e < PARTS; ++e) {
      uint d = 4u * (lane + e * LANES);
      if (d < D) store_float4(p.partial, at * (D / 4u) + d / 4u, value[h * PARTS + e]);
    }
    if (lane == 0u) {
      store_float(p.stats, at * 2u, best[h]);
      store_float(p.stats, at * 2u + 1u, sum[h]);
    }
  }
}
