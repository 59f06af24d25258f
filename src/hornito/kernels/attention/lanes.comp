// Attention of single rows over the block-tabled cache, for GPUs with subgroup shuffles: LANES lanes
// share a key, eight dims each, and every thread has a step of DEEP keys on its way. Same cut of the keys
// as split.comp, which is its plain twin. A row with one split is done here; of several splits each
// leaves a partial result, and the one that comes last joins them in a fixed order: who that is does not
// change a bit. Masked keys and values are never loaded.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 128 threads = 128 / LANES key groups of LANES lanes; x = splits, y = parts of HEADS query
// heads (the last of a KV head's group may hold fewer), z = rows.
// Requires: full subgroups of at least LANES, subgroup shuffle operations.
// Shared: a result of each subgroup, HEADS * subgroups * D <= 2048 floats, and its stats; HEADS <= 8,
// SPLITS <= 32.
// Push: addresses of the row records, block table, q [T, heads, D], partial [T, heads, SPLITS, D],
// stats [T, heads, SPLITS, 2] (max, sum), result [T, heads, D], counters [T, parts], all zero between
// calls; table stride, layer, window (0 none), scale, softcap (0 none).
// Specialisation: 0 HEADS a workgroup, 1 D, 2 kv_heads, 3 group (heads / kv_heads), 4 SPLITS,
// 5 LANES (8, 16 or 32; D / 8 at least).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "arrival.glsl"
#include "attention.glsl"
#include "threads.glsl"
#include "values.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint D = 64u;
layout(constant_id = 2) const uint KV_HEADS = 1u;
layout(constant_id = 3) const uint GROUP = 1u;
layout(constant_id = 4) const uint SPLITS = 1u;
layout(constant_id = 5) const uint LANES = 8u;

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

const uint GROUPS = 128u / LANES;
// A step is a block of keys where registers hold it; it always lies within one.
const uint DEEP = KV_BYTES == 4u || LANES < 16u ? 4u : 8u;
const uint STEP = GROUPS * DEEP;
const uint VECTORS = KV_BYTES / 2u;  // of 16 bytes, for eight numbers of the cache

// Unnormalised results that join: values, and the largest score with the weights' sum.
shared vec4 part_value[512];
shared vec2 part_stats[128];

// The keys that this workgroup sees of a row, and which of them a thread takes.
struct Keys {
  uint slot;
  uint kv_head;
  uint from;
  uint end;
  uint group;
  uint lane;
};

// A step as it lies in memory, and the block of the next one.
uvec4 raw_keys[8];
uvec4 raw_values[8];
uvec2 block_ahead;

// Of each query head: eight dims of q and of the values' sum, the largest score, and the weights' sum.
vec4 qa[8], qb[8], va[8], vb[8];
float best[8], sum[8];

bool sees(Keys k, uint key) { return key >= k.from && key < k.end; }

// Brings the step that begins at key `first`.
void fetch_step(Keys k, uint first) {
  Words block = Words(block_ahead);
  uint key_row = kv_index(p.layer, 0u, k.kv_head, KV_HEADS, 0u, D) / 8u + k.lane;
  uint value_row = kv_index(p.layer, 1u, k.kv_head, KV_HEADS, 0u, D) / 8u + k.lane;
  [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
    uint key = first + k.group + u * GROUPS;
    uint inside = key % KV_BLOCK * (D / 8u);
    bool loads = sees(k, key) && k.lane < D / 8u;
    [[unroll]] for (uint e = 0u; e < VECTORS; ++e) {
      uint i = u * VECTORS + e;
      raw_keys[i] = raw_values[i] = uvec4(0u);
      if (loads) {
        raw_keys[i] = load_words4(block, (key_row + inside) * VECTORS + e);
        raw_values[i] = load_words4(block, (value_row + inside) * VECTORS + e);
      }
    }
  }
  block_ahead = kv_block(p.table, p.table_stride, k.slot, min(first + STEP, k.end - 1u));
}

// Eight numbers of the cache, of which fp32 has the last four in the second vector.
void unpack_cached8(uvec4 first, uvec4 second, out vec4 a, out vec4 b) {
#ifdef KV_F16
  unpack8(first, a, b);
#else
  a = uintBitsToFloat(first);
  b = uintBitsToFloat(second);
#endif
}

// Adds the step that begins at key `first`.
void add_step(Keys k, uint first) {
  // Every sum of a step at once, so that no shuffle waits for the one before.
  float score[64];
  [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
    vec4 a, b;
    unpack_cached8(raw_keys[u * VECTORS], raw_keys[u * VECTORS + VECTORS - 1u], a, b);
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
      score[h * DEEP + u] = dot(qa[h], a) + dot(qb[h], b);
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
      if (!sees(k, first + k.group + u * GROUPS)) score[h * DEEP + u] = MASKED;
      now = max(now, score[h * DEEP + u]);
    }
    float keep = exp(best[h] - now);
    best[h] = now;
    sum[h] *= keep;
    va[h] *= keep;
    vb[h] *= keep;
    [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
      bool counts = sees(k, first + k.group + u * GROUPS);
      score[h * DEEP + u] = counts ? exp(score[h * DEEP + u] - now) : 0.0;
      sum[h] += score[h * DEEP + u];
    }
  }
  [[unroll]] for (uint u = 0u; u < DEEP; ++u) {
    vec4 a, b;
    unpack_cached8(raw_values[u * VECTORS], raw_values[u * VECTORS + VECTORS - 1u], a, b);
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
      va[h] += score[h * DEEP + u] * a;
      vb[h] += score[h * DEEP + u] * b;
    }
  }
}

// Four dims from 4 * d4 on of `count` results in shared memory, joined, and their stats.
vec4 join_parts(uint first, uint count, uint d4, out vec2 stats) {
  stats = vec2(MASKED, 0.0);
  for (uint g = first; g < first + count; ++g) stats.x = max(stats.x, part_stats[g].x);
  vec4 v = vec4(0.0);
  for (uint g = first; g < first + count; ++g) {
    float weight = exp(part_stats[g].x - stats.x);
    stats.y += part_stats[g].y * weight;
    v += part_value[g * (D / 4u) + d4] * weight;
  }
  return v;
}

// Joins the splits of the query heads from output `first` on: each thread takes every PARTS-th split,
// eight loads at once. Every thread of the workgroup must call it.
void join_splits(uint t, uint first, uint heads, uint splits) {
  const uint PARTS = 128u / (D / 4u);
  uint part = t / (D / 4u);
  uint d4 = t % (D / 4u);
  for (uint h = 0u; h < heads; ++h) {
    uint at = (first + h) * SPLITS;
    vec2 stats = vec2(MASKED, 0.0);
    vec4 v = vec4(0.0);
    for (uint g0 = part; g0 < splits && part < PARTS; g0 += 8u * PARTS) {
      vec4 values[8];
      vec2 own[8];
      float now = stats.x;
      [[unroll]] for (uint u = 0u; u < 8u; ++u) {
        uint g = at + min(g0 + u * PARTS, splits - 1u);
        values[u] = Passed4(uvec2(p.partial)).at[g * (D / 4u) + d4];
        own[u] = Passed2(uvec2(p.stats)).at[g];
      }
      [[unroll]] for (uint u = 0u; u < 8u; ++u) now = max(now, own[u].x);
      float keep = exp(stats.x - now);
      stats = vec2(now, stats.y * keep);
      v *= keep;
      [[unroll]] for (uint u = 0u; u < 8u; ++u) {
        float weight = g0 + u * PARTS < splits ? exp(own[u].x - now) : 0.0;
        stats.y += own[u].y * weight;
        v += values[u] * weight;
      }
    }
    barrier();
    if (part < PARTS) {
      part_value[t] = v;
      if (d4 == 0u) part_stats[part] = stats;
    }
    barrier();
    if (t < D / 4u) {
      v = join_parts(0u, min(PARTS, splits), t, stats);
      store_value4(p.result, (first + h) * (D / 4u) + t, v / stats.y);
    }
  }
}

void main() {
  uint t = thread();
  uint lane = t % LANES;
  uint split = gl_WorkGroupID.x;
  uint r = gl_WorkGroupID.z;
  const uint HEAD_PARTS = (GROUP + HEADS - 1u) / HEADS;
  uint kv_head = gl_WorkGroupID.y / HEAD_PARTS;
  uint in_group = gl_WorkGroupID.y % HEAD_PARTS * HEADS;
  uint first_out = (r * KV_HEADS + kv_head) * GROUP + in_group;
  uint heads = min(HEADS, GROUP - in_group);
  bool has_dims = lane < D / 8u;

  // Before the row says anything, so that both are on their way.
  [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
    best[h] = MASKED;
    sum[h] = 0.0;
    qa[h] = qb[h] = va[h] = vb[h] = vec4(0.0);
    if (has_dims) {
      // Heads that are not there repeat the last one, and are not stored.
      uint at = (first_out + min(h, heads - 1u)) * (D / 4u) + 2u * lane;
      qa[h] = load_value4(p.q, at) * p.scale;
      qb[h] = load_value4(p.q, at + 1u) * p.scale;
    }
  }
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  Splits s = split_keys(row.position, p.window, SPLITS);
  if (split >= s.count) return;

  uint block0 = s.first_block + split * s.per_split;
  uint block_end = min(block0 + s.per_split, s.first_block + s.blocks);
  Keys k;
  k.slot = row.slot;
  k.kv_head = kv_head;
  k.from = max(first_seen(row.position, p.window), block0 * KV_BLOCK);
  k.end = min(row.position + 1u, block_end * KV_BLOCK);
  k.group = t / LANES;
  k.lane = lane;

  uint first = k.from / STEP * STEP;
  block_ahead = kv_block(p.table, p.table_stride, k.slot, k.from);
  [[dont_unroll]] for (; first < k.end; first += STEP) {
    fetch_step(k, first);
    add_step(k, first);
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
    vec2 stats;
    vec4 v = join_parts(h * subgroups, subgroups, d4, stats);
    if (s.count == 1u) {
      store_value4(p.result, first_out * (D / 4u) + i, v / stats.y);
    } else {
      uint at = (first_out + h) * SPLITS + split;
      Passed4(uvec2(p.partial)).at[at * (D / 4u) + d4] = v;
      if (d4 == 0u) Passed2(uvec2(p.stats)).at[at] = stats;
    }
  }
  if (s.count == 1u) return;

  // The last split to arrive joins them all.
  uint counter = r * gl_NumWorkGroups.y + gl_WorkGroupID.y;
  if (arrives_last(p.counters, counter, s.count)) join_splits(t, first_out, heads, s.count);
}
