// Linear for many rows on GPUs with cooperative matrices: a tile of 32 rows of x by 64 weight rows, 64
// of K at a time through shared memory as fp16, sums in fp32. While a step is multiplied, the next
// one's loads are on their way. Twin of gemm.comp; x and weights are rounded to fp16 (x saturates).
//
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
// target: vulkan1.3
//
// Geometry: 128 threads, four subgroups of 32, each a quarter of the tile (two matrices of 16 x 16
// side by side); x = tiles of 64 weight rows, y = row tiles. With GATED 64 weight rows are 32 outputs.
// Requires: subgroups of 32, full; cooperative matrices 16 x 16 x 16 of fp16 with fp32 sums; K a
// multiple of 8.
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 6 SOFTCAP; of q also 7, 8 and 9 (quants.glsl).
#version 450
#pragma use_vulkan_memory_model
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_cooperative_matrix : require
#include "linear.glsl"

layout(local_size_x = 128) in;

const uint ROWS = 32u;
const uint COLUMNS = 64u;
const uint STEP8 = 8u;
// Rows of a tile are 72 halves (nine vectors of eight) apart, so that their banks differ.
const uint PITCH = 9u;
shared uvec4 x_tile[ROWS * PITCH];
shared uvec4 w_tile[COLUMNS * PITCH];

uint halves(float a, float b) {
  // A conversion, which drivers round to nearest even; packHalf2x16 may cut.
  return packFloat2x16(f16vec2(clamp(vec2(a, b), vec2(-65504.0), vec2(65504.0))));
}

uvec4 pack8(vec4 a, vec4 b) {
  return uvec4(halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w));
}

// Eight values of K from 8 * k8 on of row r of x; zero past the last row or K.
uvec4 fetch_x(uint r, uint k8, uint live) {
  if (r >= live || k8 * 8u >= walked(matrix())) return uvec4(0u);
  vec4 a, b;
  load_x8(matrix(), p.x, r, k8, a, b);
  return pack8(a, b);
}

// The same of a weight row.
uvec4 fetch_w(uint row, uint end, uint k8) {
  if (row >= end || k8 * 8u >= walked(matrix())) return uvec4(0u);
  vec4 a, b;
  load_weights8(matrix(), p.first + row, k8, a, b);
  return pack8(a, b);
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint live = live_rows();
  uint row0 = gl_WorkGroupID.y * ROWS;
  uint weight0 = gl_WorkGroupID.x * COLUMNS;
  uint weight_end = p.n * OUTPUT_ROWS;
  if (row0 >= live) return;

  uint part_row = (gl_SubgroupID / 2u) * 16u;
  uint part_column = (gl_SubgroupID % 2u) * 32u;
  coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> sum[2];
  [[unroll]] for (uint i = 0u; i < 2u; ++i) {
    sum[i] = coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0);
  }

  // Each thread stages eight values of K of two rows of x and of four weight rows.
  uint stage_row = t / STEP8;
  uint stage_k8 = t % STEP8;
  uvec4 x_next[2];
  uvec4 w_next[4];
  [[unroll]] for (uint u = 0u; u < 2u; ++u) {
    x_next[u] = fetch_x(row0 + stage_row + 16u * u, stage_k8, live);
  }
  [[unroll]] for (uint u = 0u; u < 4u; ++u) {
    w_next[u] = fetch_w(weight0 + stage_row + 16u * u, weight_end, stage_k8);
  }
  for (uint k8 = 0u; k8 * 8u < walked(matrix()); k8 += STEP8) {
    barrier();
    [[unroll]] for (uint u = 0u; u < 2u; ++u) {
      x_tile[(stage_row + 16u * u) * PITCH + stage_k8] = x_next[u];
    }
    [[unroll]] for (uint u = 0u; u < 4u; ++u) {
      w_tile[(stage_row + 16u * u) * PITCH + stage_k8] = w_next[u];
    }
    barrier();
    if ((k8 + STEP8) * 8u < walked(matrix())) {
      uint next = k8 + STEP8 + stage_k8;
      [[unroll]] for (uint u = 0u; u < 2u; ++u) {
        x_next[u] = fetch_x(row0 + stage_row + 16u * u, next, live);
      }
      [[unroll]] for (uint u = 0u; u < 4u; ++u) {
        w_next[u] = fetch_w(weight0 + stage_row + 16u * u, weight_end, next);
      }
    }
    [[unroll]] for (uint k = 0u; k < STEP8; k += 2u) {
      coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a;
      coopMatLoad(a, x_tile, part_row * PITCH + k, PITCH, gl_CooperativeMatrixLayoutRowMajor);
      [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b;
        coopMatLoad(b, w_tile, (part_column + 16u * i) * PITCH + k, PITCH,
                    gl_CooperativeMatrixLayoutColumnMajor);
        sum[i] = coopMatMulAdd(a, b, sum[i]);
      }
    }
  }

  // Out by way of shared memory, because the layout of a matrix is the driver's own: 16 rows of 16
  // floats (four vectors) for each subgroup.
  uint mine = gl_SubgroupID * 64u;
  uint columns = 16u / OUTPUT_ROWS;
  [[unroll]] for (uint i = 0u; i < 2u; ++i) {
    barrier();
    coopMatStore(sum[i], w_tile, mine, 4u, gl_CooperativeMatrixLayoutRowMajor);
    barrier();
    for (uint e = gl_SubgroupInvocationID; e < 16u * columns; e += 32u) {
      uint r = row0 + part_row + e / columns;
      uint column = e % columns * OUTPUT_ROWS;
      uint weight = weight0 + part_column + 16u * i + column;
      uvec4 four = w_tile[mine + e / columns * 4u + column / 4u];
      if (r < live && weight < weight_end) {
#ifdef GATED
        finish(r, weight / 2u, uintBitsToFloat(four[column % 4u]),
               uintBitsToFloat(four[column % 4u + 1u]));
#else
        finish(r, weight, uintBitsToFloat(four[column % 4u]));
#endif
      }
    }
  }
}
