// Linear for many rows on GPUs with cooperative matrices: a tile of TILE_ROWS rows of x by TILE_WEIGHTS
// weight rows, STEP of K at a time through shared memory as fp16, sums in fp32. While a step is
// multiplied, the next one lies in registers or is about to, and the one behind it is on its way: a
// compute unit holds few of these workgroups, and one step is shorter than a load takes. With SPLITS, a
// workgroup sums a part of K alone and stores raw sums, which join.comp adds up in order. Twin of
// gemm.comp; x and weights are rounded to fp16 (x saturates).
//
// variant: m32_f16 TILE_ROWS=32 TILE_WEIGHTS=64 PART_ROWS=16 PART_WEIGHTS=32 STEP=64 WEIGHT_F16
// variant: m32_q TILE_ROWS=32 TILE_WEIGHTS=64 PART_ROWS=16 PART_WEIGHTS=32 STEP=64 WEIGHT_Q
// variant: m32_gated_f16 TILE_ROWS=32 TILE_WEIGHTS=64 PART_ROWS=16 PART_WEIGHTS=32 STEP=64 GATED WEIGHT_F16
// variant: m32_gated_q TILE_ROWS=32 TILE_WEIGHTS=64 PART_ROWS=16 PART_WEIGHTS=32 STEP=64 GATED WEIGHT_Q
// variant: m64_f16 TILE_ROWS=64 TILE_WEIGHTS=64 PART_ROWS=32 PART_WEIGHTS=32 STEP=64 WEIGHT_F16
// variant: m64_q TILE_ROWS=64 TILE_WEIGHTS=64 PART_ROWS=32 PART_WEIGHTS=32 STEP=64 WEIGHT_Q
// variant: m64_gated_f16 TILE_ROWS=64 TILE_WEIGHTS=64 PART_ROWS=32 PART_WEIGHTS=32 STEP=64 GATED WEIGHT_F16
// variant: m64_gated_q TILE_ROWS=64 TILE_WEIGHTS=64 PART_ROWS=32 PART_WEIGHTS=32 STEP=64 GATED WEIGHT_Q
// variant: m128_f16 TILE_ROWS=128 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=32 STEP=32 WEIGHT_F16
// variant: m128_gated_f16 TILE_ROWS=128 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=32 STEP=32 GATED WEIGHT_F16
// variant: m128_q TILE_ROWS=128 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=32 STEP=32 WEIGHT_Q
// variant: m128_gated_q TILE_ROWS=128 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=32 STEP=32 GATED WEIGHT_Q
// variant: m256_f16 TILE_ROWS=256 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=64 STEP=16 WEIGHT_F16
// variant: m256_q TILE_ROWS=256 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=64 STEP=16 WEIGHT_Q
// variant: m256_gated_f16 TILE_ROWS=256 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=64 STEP=16 GATED WEIGHT_F16
// variant: m256_gated_q TILE_ROWS=256 TILE_WEIGHTS=128 PART_ROWS=64 PART_WEIGHTS=64 STEP=16 GATED WEIGHT_Q
// target: vulkan1.3
//
// Geometry: 32 threads for each part of PART_ROWS x PART_WEIGHTS of the tile; x = tiles of weight rows,
// y = row tiles, z = splits of K. With GATED two weight rows are one output.
// Requires: subgroups of 32, full; cooperative matrices 16 x 16 x 16 of fp16 with fp32 sums; K a
// multiple of 8; shared memory as in ops/linear.py.
// Push: see linear.glsl. With SPLITS, result holds [SPLITS, row tiles * TILE_ROWS, weight rows].
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 X_HALF (x is fp16), 5 SPLITS, 6 SOFTCAP;
// of q also 7, 8 and 9 (quants.glsl).
#version 450
#pragma use_vulkan_memory_model
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_cooperative_matrix : require
#include "linear4.glsl"
#include "raw.glsl"

#define THREADS (32 * (TILE_ROWS / PART_ROWS) * (TILE_WEIGHTS / PART_WEIGHTS))
layout(local_size_x = THREADS) in;
layout(constant_id = 3) const uint X_HALF = 0u;
layout(constant_id = 5) const uint SPLITS = 1u;

const uint STEP8 = STEP / 8;
// Rows of a tile are one vector of eight more than a step apart, so that their banks differ.
const uint PITCH = STEP8 + 1u;
const uint X_SIZE = TILE_ROWS * PITCH;
const uint W_SIZE = TILE_WEIGHTS * PITCH;
shared uvec4 x_tile[2 * TILE_ROWS * (STEP / 8 + 1)];
shared uvec4 w_tile[2 * TILE_WEIGHTS * (STEP / 8 + 1)];

const uint X_LOADS = TILE_ROWS * STEP / 8 / THREADS;
const uint W_LOADS = TILE_WEIGHTS * STEP / 8 / THREADS;
const uint A_PARTS = PART_ROWS / 16;
const uint B_PARTS = PART_WEIGHTS / 16;

// Two steps on their way.
uvec4 x_next[2][X_LOADS];
uvec4 x_more[2][X_LOADS];
uvec4 w_next[2][W_LOADS];

// Eight numbers of row r of x from x_column(8 * k8) on, as they lie in memory: fp16, or fp32 in two parts.
void fetch_x(Matrix m, uint r, uint k8, out uvec4 a, out uvec4 b) {
  uint at = r * (p.k / 8u) + k8;
#ifdef WEIGHT_Q
  if (OUTLIERS > 0u && k8 >= p.k / 8u) {
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
      uint first = r * p.k + x_column(m, 8u * k8 + (X_HALF == 1u ? 2u * e : e));
      uint second = r * p.k + x_column(m, 8u * k8 + (X_HALF == 1u ? 2u * e + 1u : 4u + e));
      if (X_HALF == 1u) {
        a[e] = packHalf2x16(vec2(load_half(Words(uvec2(p.x)), first),
                                 load_half(Words(uvec2(p.x)), second)));
      } else {
        a[e] = load_word(Words(uvec2(p.x)), first);
        b[e] = load_word(Words(uvec2(p.x)), second);
      }
    }
    return;
  }
#endif
  if (X_HALF == 1u) {
    a = load_words4(Words(uvec2(p.x)), at);
  } else {
    a = load_words4(Words(uvec2(p.x)), 2u * at);
    b = load_words4(Words(uvec2(p.x)), 2u * at + 1u);
  }
}

// Brings step s on its way, as number `to` of the two. Threads past the last row or column repeat what is
// there: no branch stands between the loads.
void fetch(uint to, Matrix m, uint s, uint row0, uint last_row, uint weight0, uint last_weight) {
  uint last8 = walked(m) / 8u - 1u;
  [[unroll]] for (uint u = 0u; u < X_LOADS; ++u) {
    uint i = gl_LocalInvocationID.x + u * THREADS;
    uint k8 = min(s * STEP8 + i % STEP8, last8);
    fetch_x(m, min(row0 + i / STEP8, last_row), k8, x_next[to][u], x_more[to][u]);
  }
  [[unroll]] for (uint u = 0u; u < W_LOADS; ++u) {
    uint i = gl_LocalInvocationID.x + u * THREADS;
    uint row = p.first + min(weight0 + i / STEP8, last_weight);
    w_next[to][u] = load_raw8(m, row, min(s * STEP8 + i % STEP8, last8));
  }
}

// What was fetched as number `from`, as fp16, into one side of the tiles; zeros past the last column.
void stage(uint from, Matrix m, uint s, uint side, uint weight0, uint last_weight) {
  uint last8 = walked(m) / 8u - 1u;
  [[unroll]] for (uint u = 0u; u < X_LOADS; ++u) {
    uint i = gl_LocalInvocationID.x + u * THREADS;
    uvec4 x = x_next[from][u];
    if (X_HALF == 0u) x = pack8(uintBitsToFloat(x), uintBitsToFloat(x_more[from][u]));
    x = s * STEP8 + i % STEP8 > last8 ? uvec4(0u) : x;
    x_tile[side * X_SIZE + i / STEP8 * PITCH + i % STEP8] = x;
  }
  [[unroll]] for (uint u = 0u; u < W_LOADS; ++u) {
    uint i = gl_LocalInvocationID.x + u * THREADS;
    uint row = p.first + min(weight0 + i / STEP8, last_weight);
    uint k8 = min(s * STEP8 + i % STEP8, last8);
    w_tile[side * W_SIZE + i / STEP8 * PITCH + i % STEP8] = decode_raw8(m, row, k8, w_next[from][u]);
  }
}

#define SUM coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
SUM sum[A_PARTS * B_PARTS];

// Adds the products of one side of the tiles.
void multiply(uint side, uint part_row, uint part_column) {
  [[unroll]] for (uint k = 0u; k < STEP8; k += 2u) {
    coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a[A_PARTS];
    [[unroll]] for (uint i = 0u; i < A_PARTS; ++i) {
      coopMatLoad(a[i], x_tile, side * X_SIZE + (part_row + 16u * i) * PITCH + k, PITCH,
                  gl_CooperativeMatrixLayoutRowMajor);
    }
    [[unroll]] for (uint j = 0u; j < B_PARTS; ++j) {
      coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b;
      coopMatLoad(b, w_tile, side * W_SIZE + (part_column + 16u * j) * PITCH + k, PITCH,
                  gl_CooperativeMatrixLayoutColumnMajor);
      [[unroll]] for (uint i = 0u; i < A_PARTS; ++i) {
        sum[i * B_PARTS + j] = coopMatMulAdd(a[i], b, sum[i * B_PARTS + j]);
      }
    }
  }
}

void main() {
  uint live = live_rows();
  uint row0 = gl_WorkGroupID.y * TILE_ROWS;
  uint weight0 = gl_WorkGroupID.x * TILE_WEIGHTS;
  uint weight_end = p.n * OUTPUT_ROWS;
  if (row0 >= live) return;
  // This split's steps of K.
  Matrix m = matrix();
  uint steps = (walked(m) + STEP - 1u) / STEP;
  uint per_split = (steps + SPLITS - 1u) / SPLITS;
  uint step0 = gl_WorkGroupID.z * per_split;
  uint step_end = min(step0 + per_split, steps);

  const uint PARTS = TILE_WEIGHTS / PART_WEIGHTS;
  uint part_row = (gl_SubgroupID / PARTS) * PART_ROWS;
  uint part_column = (gl_SubgroupID % PARTS) * PART_WEIGHTS;
  [[unroll]] for (uint i = 0u; i < A_PARTS * B_PARTS; ++i) sum[i] = SUM(0.0);

  uint last_row = live - 1u;
  uint last_weight = weight_end - 1u;
  fetch(0u, m, step0, row0, last_row, weight0, last_weight);
  fetch(1u, m, step0 + 1u, row0, last_row, weight0, last_weight);
  stage(0u, m, step0, 0u, weight0, last_weight);
  barrier();
  // Two steps a turn, so that no register is copied while its load is on the way.
  for (uint s = step0; s < step_end; s += 2u) {
    fetch(0u, m, s + 2u, row0, last_row, weight0, last_weight);
    multiply(0u, part_row, part_column);
    stage(1u, m, s + 1u, 1u, weight0, last_weight);
    barrier();
    if (s + 1u < step_end) {
      fetch(1u, m, s + 3u, row0, last_row, weight0, last_weight);
      multiply(1u, part_row, part_column);
      stage(0u, m, s + 2u, 0u, weight0, last_weight);
      barrier();
    }
  }

  // Out by way of shared memory, because the layout of a matrix is the driver's own: 16 rows of 16
  // floats (four vectors) for each subgroup.
  uint mine = gl_SubgroupID * 64u;
  uint all_rows = gl_NumWorkGroups.y * TILE_ROWS;
  [[unroll]] for (uint i = 0u; i < A_PARTS; ++i) {
    [[unroll]] for (uint j = 0u; j < B_PARTS; ++j) {
      subgroupBarrier();
      coopMatStore(sum[i * B_PARTS + j], x_tile, mine, 4u, gl_CooperativeMatrixLayoutRowMajor);
      subgroupMemoryBarrierShared();
      subgroupBarrier();
      [[unroll]] for (uint e = 0u; e < 64u; e += 32u) {
        uint item = e + gl_SubgroupInvocationID;
        uint r = row0 + part_row + 16u * i + item / 4u;
        uint weight = weight0 + part_column + 16u * j + item % 4u * 4u;
        vec4 four = uintBitsToFloat(x_tile[mine + item]);
        if (r < live && weight < weight_end) {
          if (SPLITS > 1u) {
            uint at = (gl_WorkGroupID.z * all_rows + r) * weight_end + weight;
            if (weight_end % 4u == 0u) {
              store_float4(p.result, at / 4u, four);
            } else {
              for (uint c = 0u; c < 4u; ++c) {
                if (weight + c < weight_end) store_float(p.result, at + c, four[c]);
              }
            }
          } else {
            finish4(r, weight, four);
          }
        }
      }
    }
  }
}
