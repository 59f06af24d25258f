// Attention of a chunk of rows of one slot at contiguous positions with cooperative matrices, flash
// style: each subgroup holds 16 query rows of one head and walks the keys once, KEYS at a time, with a
// running maximum and sum. Scores, sums and values are fp32, their factors fp16. Keys and values come
// through shared memory, the next ones' loads are on their way while the last are used. Masked keys and
// values are never loaded; rows that are not live are not stored. Twin of flash.comp.
//
// variant: d64 DIMS=64 KEYS=64
// variant: d128 DIMS=128 KEYS=32
// variant: d256 DIMS=256 KEYS=32
// target: vulkan1.3
//
// Geometry: 128 threads, four subgroups of 32, 16 rows each; x = tiles of 64 rows, y = heads.
// Requires: subgroups of 32, full; cooperative matrices 16 x 16 x 16 of fp16 with fp32 sums; keys and
// values in fp16; D a multiple of 8, at most DIMS; shared memory as in ops/attention.py.
// Push: addresses of the row records, block table, q [T, heads, D], out [T, heads, D], the call
// header {live rows}; table stride, layer, window (0 none), scale, softcap (0 none).
// Specialisation: 1 D, 2 kv_heads, 3 group (heads / kv_heads).
#version 450
#pragma use_vulkan_memory_model
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_cooperative_matrix : require
#define KV_F16
#include "attention.glsl"
#include "halves.glsl"
#include "values.glsl"

layout(local_size_x = 128) in;
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

const uint DIMS8 = DIMS / 8;
const uint PARTS = DIMS / 16;   // matrices across a head
const uint KEY_PARTS = KEYS / 16;
// Pitches in vectors of 16 bytes, one more than the data, so that banks differ.
const uint KV_PITCH = DIMS8 + 1u;
const uint SCORE_PITCH = KEYS / 4 + 1;  // fp32
const uint WEIGHT_PITCH = KEYS / 8 + 1;  // fp16
const uint LOADS = KEYS * DIMS / 8 / 128;
const uint OWN = KEYS / 2;  // scores of a lane: two lanes share a row

#define SCORE_SIZE (16 * (KEYS / 4 + 1))
shared uvec4 key_tile[KEYS * (DIMS / 8 + 1)];
shared uvec4 value_tile[KEYS * (DIMS / 8 + 1)];
// A subgroup's scores, then their exponentials as fp16 in the same place.
shared uvec4 score_tile[4 * SCORE_SIZE];
shared vec4 row_tile[4 * 4];

#define ACC coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define MAT_A coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define MAT_B coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>

uvec4 next_key[LOADS];
uvec4 next_value[LOADS];

// Loads of KEYS keys and values from `key0` on that lie in [from, to]; the others are zero.
void fetch(uint slot, uint kv_head, uint key0, uint from, uint to) {
  Words block = Words(kv_block(p.table, p.table_stride, slot, key0));
  uint keys = kv_index(p.layer, 0u, kv_head, KV_HEADS, key0, D) / 8u;
  uint values = kv_index(p.layer, 1u, kv_head, KV_HEADS, key0, D) / 8u;
  if (key0 >= from && key0 + KEYS - 1u <= to && D == DIMS) {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
      uint i = gl_LocalInvocationID.x + u * 128u;
      next_key[u] = load_words4(block, keys + i);
      next_value[u] = load_words4(block, values + i);
    }
    return;
  }
  [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
    uint i = gl_LocalInvocationID.x + u * 128u;
    uint key = key0 + i / DIMS8;
    uint d8 = i % DIMS8;
    next_key[u] = uvec4(0u);
    next_value[u] = uvec4(0u);
    if (key >= from && key <= to && d8 < D / 8u) {
      next_key[u] = load_words4(block, keys + i / DIMS8 * (D / 8u) + d8);
      next_value[u] = load_words4(block, values + i / DIMS8 * (D / 8u) + d8);
    }
  }
}

void subgroup_sync() {
  subgroupMemoryBarrierShared();
  subgroupBarrier();
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint lane = gl_SubgroupInvocationID;
  uint head = gl_WorkGroupID.y;
  uint kv_head = head / GROUP;
  uint live = load_word(p.call, 0u);
  uint tile0 = gl_WorkGroupID.x * 64u;
  if (tile0 >= live) return;
  uint tile_rows = min(64u, live - tile0);
  Row first = load_row(p.rows, tile0);
  uint heads = KV_HEADS * GROUP;

  // q of the whole tile as fp16, by way of the key tile, KEYS rows at a time.
  MAT_A q[PARTS];
  [[unroll]] for (uint part = 0u; part < 64u / KEYS; ++part) {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
      uint i = t + u * 128u;
      uint r = part * KEYS + i / DIMS8;
      uint d8 = i % DIMS8;
      uvec4 v = uvec4(0u);
      if (r < tile_rows && d8 < D / 8u) {
        uint at = ((tile0 + r) * heads + head) * (D / 4u) + 2u * d8;
        v = pack8(load_value4(p.q, at) * p.scale, load_value4(p.q, at + 1u) * p.scale);
      }
      key_tile[i / DIMS8 * KV_PITCH + d8] = v;
    }
    barrier();
    if (gl_SubgroupID * 16u / KEYS == part) {
      [[unroll]] for (uint d = 0u; d < PARTS; ++d) {
        coopMatLoad(q[d], key_tile, gl_SubgroupID * 16u % KEYS * KV_PITCH + 2u * d, KV_PITCH,
                    gl_CooperativeMatrixLayoutRowMajor);
      }
    }
    barrier();
  }

  ACC value[PARTS];
  [[unroll]] for (uint d = 0u; d < PARTS; ++d) value[d] = ACC(0.0);
  // Of the lane's row, in both lanes that share it.
  uint row = gl_SubgroupID * 16u + lane / 2u;
  uint position = first.position + row;
  uint row_from = first_seen(position, p.window);
  float best = MASKED;
  float sum = 0.0;
  uint scores = gl_SubgroupID * SCORE_SIZE;
  uint factors = gl_SubgroupID * 4u;

  uint last = first.position + tile_rows - 1u;
  uint from = first_seen(first.position, p.window);
  uint key0 = from / KEYS * KEYS;
  fetch(first.slot, kv_head, key0, from, last);
  for (; key0 <= last; key0 += KEYS) {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
      uint i = t + u * 128u;
      uint at = i / DIMS8 * KV_PITCH + i % DIMS8;
      key_tile[at] = next_key[u];
      value_tile[at] = next_value[u];
    }
    barrier();
    if (key0 + KEYS <= last) fetch(first.slot, kv_head, key0 + KEYS, from, last);

    [[unroll]] for (uint j = 0u; j < KEY_PARTS; ++j) {
      ACC score = ACC(0.0);
      [[unroll]] for (uint d = 0u; d < PARTS; ++d) {
        MAT_B k;
        coopMatLoad(k, key_tile, 16u * j * KV_PITCH + 2u * d, KV_PITCH,
                    gl_CooperativeMatrixLayoutColumnMajor);
        score = coopMatMulAdd(q[d], k, score);
      }
      coopMatStore(score, score_tile, scores + 4u * j, SCORE_PITCH,
                   gl_CooperativeMatrixLayoutRowMajor);
    }
    subgroup_sync();

    // Two lanes a row, in turn eight keys each.
    vec4 own[OWN / 4];
    uint at = scores + lane / 2u * SCORE_PITCH + lane % 2u * 2u;
    [[unroll]] for (uint i = 0u; i < OWN / 4u; ++i) {
      own[i] = uintBitsToFloat(score_tile[at + i / 2u * 4u + i % 2u]);
    }
    if (p.softcap > 0.0) {
      [[unroll]] for (uint i = 0u; i < OWN / 4u; ++i) {
        own[i] = p.softcap * tanh(clamp(own[i] / p.softcap, vec4(-15.0), vec4(15.0)));
      }
    }
    if (key0 + KEYS > first.position + gl_SubgroupID * 16u + 1u || p.window != 0u) {
      [[unroll]] for (uint i = 0u; i < OWN / 4u; ++i) {
        uint key = key0 + i / 2u * 16u + lane % 2u * 8u + i % 2u * 4u;
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
          if (key + e > position || key + e < row_from) own[i][e] = MASKED;
        }
      }
    }
    float now = best;
    [[unroll]] for (uint i = 0u; i < OWN / 4u; ++i) {
      now = max(max(now, max(own[i].x, own[i].y)), max(own[i].z, own[i].w));
    }
    now = max(now, subgroupShuffleXor(now, 1u));
    float keep = exp(best - now);
    best = now;
    sum *= keep;
    // A row that has seen no key yet has exponentials of zero, not of one.
    float base = now == MASKED ? 0.0 : now;
    uint to = scores + lane / 2u * WEIGHT_PITCH + lane % 2u;
    subgroupBarrier();
    [[unroll]] for (uint i = 0u; i < OWN / 4u; i += 2u) {
      vec4 a = exp(own[i] - base);
      vec4 b = exp(own[i + 1u] - base);
      sum += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
      score_tile[to + i] = pack8(a, b);
    }
    if (lane % 2u == 0u) row_tile[factors + lane / 8u][lane / 2u % 4u] = keep;
    subgroup_sync();

    // Every row of a column is multiplied with its own factor.
    ACC factor;
    coopMatLoad(factor, row_tile, factors, 0u, gl_CooperativeMatrixLayoutColumnMajor);
    [[unroll]] for (uint d = 0u; d < PARTS; ++d) value[d] = value[d] * factor;
    [[unroll]] for (uint j = 0u; j < KEY_PARTS; ++j) {
      MAT_A weight;
      coopMatLoad(weight, score_tile, scores + 2u * j, WEIGHT_PITCH,
                  gl_CooperativeMatrixLayoutRowMajor);
      [[unroll]] for (uint d = 0u; d < PARTS; ++d) {
        MAT_B v;
        coopMatLoad(v, value_tile, 16u * j * KV_PITCH + 2u * d, KV_PITCH,
                    gl_CooperativeMatrixLayoutRowMajor);
        value[d] = coopMatMulAdd(weight, v, value[d]);
      }
    }
    barrier();
  }

  // Out by way of shared memory, 16 dims of the subgroup's rows at a time.
  sum += subgroupShuffleXor(sum, 1u);
  [[unroll]] for (uint d = 0u; d < PARTS; ++d) {
    coopMatStore(value[d], score_tile, scores, 4u, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_sync();
    uint d8 = 2u * d + lane % 2u;
    if (row < tile_rows && d8 < D / 8u) {
      uint from_tile = scores + lane / 2u * 4u + lane % 2u * 2u;
      vec4 a = uintBitsToFloat(score_tile[from_tile]) / sum;
      vec4 b = uintBitsToFloat(score_tile[from_tile + 1u]) / sum;
      uint to = ((tile0 + row) * heads + head) * (D / 8u) + d8;
      store_value4(p.result, 2u * to, a);
      store_value4(p.result, 2u * to + 1u, b);
    }
    subgroupBarrier();
  }
}
