// Linear for many rows on GPUs: a tile of TILE_ROWS rows of x by 64 output rows, 16 of K at a time
// through shared memory, each thread a small block of sums in registers.
//
// variant: m16_f32 TILE_ROWS=16
// variant: m16_f16 TILE_ROWS=16 WEIGHT_F16
// variant: m16_q TILE_ROWS=16 WEIGHT_Q
// variant: m16_gated_f32 TILE_ROWS=16 GATED
// variant: m16_gated_f16 TILE_ROWS=16 GATED WEIGHT_F16
// variant: m16_gated_q TILE_ROWS=16 GATED WEIGHT_Q
// variant: m64_f32 TILE_ROWS=64
// variant: m64_f16 TILE_ROWS=64 WEIGHT_F16
// variant: m64_q TILE_ROWS=64 WEIGHT_Q
// variant: m64_gated_f32 TILE_ROWS=64 GATED
// variant: m64_gated_f16 TILE_ROWS=64 GATED WEIGHT_F16
// variant: m64_gated_q TILE_ROWS=64 GATED WEIGHT_Q
//
// Geometry: 64 threads as 16 column groups (4 outputs each) by 4 row groups; x = output tiles of 64,
// y = row tiles. With GATED a tile covers 64 pairs of a gate and an up row.
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 WIDE (K is a multiple of 8),
// 6 SOFTCAP, 7 FORMAT, 8 GROUP, 9 OUTLIERS.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "linear.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 3) const uint WIDE = 1u;

const uint STEP = 16u;
const uint THREAD_ROWS = TILE_ROWS / 4;
shared float x_tile[STEP * TILE_ROWS];
shared float w_tile[STEP * 64];
#ifdef GATED
shared float up_tile[STEP * 64];
#endif

// Eight values of K from k0 of one matrix row, zero past the row's end.
void fetch8(Matrix w, uint row, uint k0, out float v[8]) {
  if (WIDE == 1u) {
    vec4 a = vec4(0.0), b = vec4(0.0);
    if (k0 < walked(w)) load_weights8(w, row, k0 / 8u, a, b);
    for (uint i = 0u; i < 4u; ++i) {
      v[i] = a[i];
      v[4u + i] = b[i];
    }
  } else {
    for (uint i = 0u; i < 8u; ++i) v[i] = k0 + i < p.k ? load_weight(w, row, k0 + i) : 0.0;
  }
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint n0 = gl_WorkGroupID.x * 64u;
  uint row0 = gl_WorkGroupID.y * TILE_ROWS;
  uint live = live_rows();
  if (row0 >= live) return;
  Matrix m = matrix();
  uint column = t % 16u;
  uint row_group = t / 16u;
  float sum[THREAD_ROWS][4];
#ifdef GATED
  float up[THREAD_ROWS][4];
#endif
  for (uint r = 0u; r < THREAD_ROWS; ++r) {
    for (uint c = 0u; c < 4u; ++c) {
      sum[r][c] = 0.0;
#ifdef GATED
      up[r][c] = 0.0;
#endif
    }
  }
  for (uint k0 = 0u; k0 < walked(m); k0 += STEP) {
    barrier();
    for (uint i = t; i < STEP * TILE_ROWS; i += 64u) {
      uint r = min(row0 + i / STEP, live - 1u);
      uint k = k0 + i % STEP;
      x_tile[(i % STEP) * TILE_ROWS + i / STEP] =
          k < walked(m) ? load_value(p.x, r * p.k + x_column(m, k)) : 0.0;
    }
    for (uint i = t; i < 128u; i += 64u) {
      uint own = weight_row(min(n0 + i / 2u, p.n - 1u));
      uint k = (i % 2u) * 8u;
      float v[8];
      fetch8(m, own, k0 + k, v);
      for (uint e = 0u; e < 8u; ++e) w_tile[(k + e) * 64u + i / 2u] = v[e];
#ifdef GATED
      fetch8(m, own + 1u, k0 + k, v);
      for (uint e = 0u; e < 8u; ++e) up_tile[(k + e) * 64u + i / 2u] = v[e];
#endif
    }
    barrier();
    for (uint k = 0u; k < STEP; ++k) {
      float wv[4];
      for (uint c = 0u; c < 4u; ++c) wv[c] = w_tile[k * 64u + c * 16u + column];
#ifdef GATED
      float uv[4];
      for (uint c = 0u; c < 4u; ++c) uv[c] = up_tile[k * 64u + c * 16u + column];
#endif
      for (uint r = 0u; r < THREAD_ROWS; ++r) {
        float xv = x_tile[k * TILE_ROWS + row_group * THREAD_ROWS + r];
        for (uint c = 0u; c < 4u; ++c) {
          sum[r][c] = fma(xv, wv[c], sum[r][c]);
#ifdef GATED
          up[r][c] = fma(xv, uv[c], up[r][c]);
#endif
        }
      }
    }
  }
  for (uint r = 0u; r < THREAD_ROWS; ++r) {
    uint row = row0 + row_group * THREAD_ROWS + r;
    for (uint c = 0u; c < 4u; ++c) {
      uint n = n0 + c * 16u + column;
      if (row < live && n < p.n) {
#ifdef GATED
        finish(row, n, sum[r][c], up[r][c]);
#else
        finish(row, n, sum[r][c]);
#endif
      }
    }
  }
}
