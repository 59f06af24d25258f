// Attention of single rows over the block-tabled cache, for GPUs with subgroup shuffles: LANES lanes
// share a key, eight dims each, and 128 / LANES keys are in flight, four deep. Same cut of the keys as
// split.comp, which is its plain twin. A row with one split is done here; of several splits each leaves
// a partial result, and the one that comes last joins them in order: who that is does not change a bit.
// Masked keys and values are never loaded.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 128 threads = 128 / LANES key groups of LANES lanes; x = splits, y = parts of HEADS query
// heads (the last of a KV head's group may hold fewer), z = rows.
// Requires: full subgroups of at least LANES, subgroup shuffle operations.
// Shared: a result of each subgroup, HEADS * subgroups * D <= 2048 floats, and its stats; HEADS <= 8.
// Push: addresses of the row records, block table, q [T, heads, D] fp32, partial [T, heads, SPLITS, D],
// stats [T, heads, SPLITS, 2] (max, sum), result [T, heads, D], counters [T, parts], all zero between
// calls; table stride, layer, window (0 none), scale, softcap (0 none).
// Specialisation: 0 HEADS a workgroup, 1 D, 2 kv_heads, 3 group (heads / kv_heads), 4 SPLITS,
// 5 LANES (8, 16 or 32; D / 8 at least).
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
layout(constant_id = 5) const uint LANES = 8u;

// What one workgroup writes and another reads within a dispatch.
layout(buffer_reference, std430, buffer_reference_align = 16) coherent buffer Passed4 { vec4 at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) coherent buffer Passed2 { vec2 at[]; };

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats q;
  Floats partial;
  Floats stats;
  Floats result;
  Words counters;
  uint table_stride;
  uint layer;
  uint window;
  float scale;
  float softcap;
} p;

const uint DEEP = 4u;
shared vec4 part_value[512];
shared vec2 part_stats[128];
shared uint arrived;

// Eight numbers of the cache from element i on, a multiple of eight.
void load_kv8(Words base, uint i, out vec4 a, out vec4 b) {
#ifdef KV_F16
  uvec4 w = load_words4(base, i / 8u);
  a = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
  b = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
#else
  a = load_kv4(base, i);
  b = load_kv4(base, i + 4u);
#endif
}

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

  const uint PARTS = (GROUP + HEADS - 1u) / HEADS;
  uint kv_head = gl_WorkGroupID.y / PARTS;
  uint in_group = gl_WorkGroupID.y % PARTS * HEADS;
  uint first_out = (r * KV_HEADS + kv_head) * GROUP + in_group;
  uint heads = min(HEADS, GROUP - in_group);
  bool has_dims = lane < D / 8u;

  vec4 qa[8], qb[8], va[8], vb[8];
  float best[8], sum[8];
  [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
    best[h] = MASKED;
    sum[h] = 0.0;
    qa[h] = qb[h] = va[h] = vb[h] = vec4(0.0);
    if (has_dims) {
      // Heads that are not there repeat the last one, and are not stored.
      uint at = (first_out + min(h, heads - 1u)) * (D / 4u) + 2u * lane;
      qa[h] = load_float4(p.q, at) * p.scale;
      qb[h] = load_float4(p.q, at + 1u) * p.scale;
    }
  }

  uint seen_from = first_seen(row.position, p.window);
  uint block0 = s.first_block + split * s.per_split;
  uint block_end = min(block0 + s.per_split, s.first_block + s.blocks);
  const uint GROUPS = 128u / LANES;
  for (uint b = block0; b < block_end; ++b) {
    Words block = Words(kv_block(p.table, p.table_stride, row.slot, b * KV_BLOCK));
    uint keys = kv_index(p.layer, 0u, kv_head, KV_HEADS, 0u, D) + 8u * lane;
    uint values = kv_index(p.layer, 1u, kv_head, KV_HEADS, 0u, D) + 8u * lane;
    for (uint j0 = key_group; j0 < KV_BLOCK; j0 += GROUPS * DEEP) {
      vec4 ka[DEEP], kb[DEEP], wa[DEEP], wb[DEEP];
      bool seen[DEEP];
      [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
        uint j = j0 + u * GROUPS;
        uint key = b * KV_BLOCK + j;
        seen[u] = j < KV_BLOCK && key <= row.position && key >= seen_from;
        ka[u] = kb[u] = wa[u] = wb[u] = vec4(0.0);
        if (seen[u] && has_dims) {
          load_kv8(block, keys + j * D, ka[u], kb[u]);
          load_kv8(block, values + j * D, wa[u], wb[u]);
        }
      }
      // Every sum of a step at once, so that no shuffle waits for the one before.
      float score[8u * DEEP];
      [[unroll]] for (uint i = 0u; i < HEADS * DEEP; ++i) {
        score[i] = dot(qa[i / DEEP], ka[i % DEEP]) + dot(qb[i / DEEP], kb[i % DEEP]);
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
        va[h] *= keep;
        vb[h] *= keep;
        [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
          float weight = seen[u] ? exp(score[h * DEEP + u] - now) : 0.0;
          sum[h] += weight;
          va[h] += weight * wa[u];
          vb[h] += weight * wb[u];
        }
      }
    }
  }

  // The key groups of a subgroup join by shuffles, the subgroups' results through shared memory.
  for (uint m = LANES; m < gl_SubgroupSize && m < 128u; m <<= 1) {
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
      float other = subgroupShuffleXor(best[h], m);
      float now = max(best[h], other);
      float mine = exp(best[h] - now);
      float theirs = exp(other - now);
      best[h] = now;
      sum[h] = sum[h] * mine + subgroupShuffleXor(sum[h], m) * theirs;
      [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        va[h][e] = va[h][e] * mine + subgroupShuffleXor(va[h][e], m) * theirs;
        vb[h][e] = vb[h][e] * mine + subgroupShuffleXor(vb[h][e], m) * theirs;
      }
    }
  }
  uint subgroups = max(128u / gl_SubgroupSize, 1u);
  if (gl_SubgroupInvocationID < LANES) {
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
      uint at = h * subgroups + gl_SubgroupID;
      if (has_dims) {
        part_value[at * (D / 4u) + 2u * lane] = va[h];
        part_value[at * (D / 4u) + 2u * lane + 1u] = vb[h];
      }
      if (lane == 0u) part_stats[at] = vec2(best[h], sum[h]);
    }
  }
  barrier();
  for (uint i = t; i < heads * (D / 4u); i += 128u) {
    uint h = i / (D / 4u);
    uint d4 = i % (D / 4u);
    float top = MASKED;
    for (uint g = 0u; g < subgroups; ++g) top = max(top, part_stats[h * subgroups + g].x);
    float all = 0.0;
    vec4 v = vec4(0.0);
    for (uint g = 0u; g < subgroups; ++g) {
      uint at = h * subgroups + g;
      float weight = exp(part_stats[at].x - top);
      all += part_stats[at].y * weight;
      v += part_value[at * (D / 4u) + d4] * weight;
    }
    if (s.count == 1u) {
      store_float4(p.result, (first_out + h) * (D / 4u) + d4, v / all);
    } else {
      uint at = (first_out + h) * SPLITS + split;
      Passed4(uvec2(p.partial)).at[at * (D / 4u) + d4] = v;
      if (d4 == 0u) Passed2(uvec2(p.stats)).at[at] = vec2(top, all);
    }
  }
  if (s.count == 1u) return;

  // The last split to arrive joins them all.
  memoryBarrierBuffer();
  barrier();
  uint counter = r * gl_NumWorkGroups.y + gl_WorkGroupID.y;
  if (t == 0u) arrived = add_word(p.counters, counter, 1u);
  barrier();
  if (arrived + 1u != s.count) return;
  memoryBarrierBuffer();
  if (t == 0u) store_word(p.counters, counter, 0u);
  for (uint i = t; i < heads * (D / 4u); i += 128u) {
    uint h = i / (D / 4u);
    uint at = (first_out + h) * SPLITS;
    float top = MASKED;
    for (uint g = 0u; g < s.count; ++g) top = max(top, Passed2(uvec2(p.stats)).at[at + g].x);
    float all = 0.0;
    vec4 v = vec4(0.0);
    for (uint g = 0u; g < s.count; ++g) {
      vec2 stat = Passed2(uvec2(p.stats)).at[at + g];
      float weight = exp(stat.x - top);
      all += stat.y * weight;
      v += Passed4(uvec2(p.partial)).at[(at + g) * (D / 4u) + i % (D / 4u)] * weight;
    }
    store_float4(p.result, first_out * (D / 4u) + i, v / all);
  }
}
