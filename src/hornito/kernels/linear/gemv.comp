// Linear for few rows on GPUs: LANES threads share an output row and stride through its weights in
// coalesced 16-byte words; their sums join in a fixed tree.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
//
// Geometry: 128 threads = LANES x (128 / LANES) output rows (x); ROWS rows of x a workgroup (y).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 ROWS (1 to 4), 4 WIDE (K is a multiple of 8),
// 5 LANES (a power of two, 8 to 128), 6 SOFTCAP, 7 FORMAT, 8 GROUP, 9 OUTLIERS.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "linear.glsl"

layout(local_size_x = 128) in;
layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint WIDE = 1u;
layout(constant_id = 5) const uint LANES = 32u;

#ifdef GATED
const uint SUMS = 2u;
#else
const uint SUMS = 1u;
#endif
shared float tree[128 * 4 * SUMS];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint lane = t % LANES;
  uint n = gl_WorkGroupID.x * (128u / LANES) + t / LANES;
  uint row0 = gl_WorkGroupID.y * ROWS;
  uint live = live_rows();
  if (row0 >= live) return;
  uint own = weight_row(min(n, p.n - 1u));
  Matrix m = matrix();
  // sum[r], and with GATED sum[4 + r] for the up row.
  float sum[4 * SUMS];
  for (uint i = 0u; i < 4u * SUMS; ++i) sum[i] = 0.0;
  if (WIDE == 1u) {
    uint k8 = walked(m) / 8u;
    // Weights of four strides are on their way before the first is used.
    for (uint i0 = lane; i0 < k8; i0 += 4u * LANES) {
      vec4 a[4], b[4];
#ifdef GATED
      vec4 c[4], d[4];
#endif
      [[unroll]] for (uint u = 0u; u < 4u; ++u) {
        uint i = min(i0 + u * LANES, k8 - 1u);
        load_weights8(m, own, i, a[u], b[u]);
#ifdef GATED
        load_weights8(m, own + 1u, i, c[u], d[u]);
#endif
      }
      [[unroll]] for (uint u = 0u; u < 4u; ++u) {
        uint i = i0 + u * LANES;
        if (i >= k8) break;
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
          vec4 x, y;
          load_x8(m, p.x, row0 + r, i, x, y);
          sum[r] += dot(a[u], x) + dot(b[u], y);
#ifdef GATED
          sum[4u + r] += dot(c[u], x) + dot(d[u], y);
#endif
        }
      }
    }
  } else {
    for (uint i = lane; i < p.k; i += LANES) {
      float a = load_weight(m, own, i);
#ifdef GATED
      float c = load_weight(m, own + 1u, i);
#endif
      for (uint r = 0u; r < ROWS; ++r) {
        float x = load_float(p.x, (row0 + r) * p.k + i);
        sum[r] += a * x;
#ifdef GATED
        sum[4u + r] += c * x;
#endif
      }
    }
  }
  for (uint r = 0u; r < ROWS; ++r) {
    tree[r * 128u + t] = sum[r];
#ifdef GATED
    tree[(4u + r) * 128u + t] = sum[4u + r];
#endif
  }
  for (uint w = LANES / 2u; w > 0u; w >>= 1) {
    barrier();
    if (lane < w) {
      for (uint r = 0u; r < ROWS; ++r) {
        tree[r * 128u + t] += tree[r * 128u + t + w];
#ifdef GATED
        tree[(4u + r) * 128u + t] += tree[(4u + r) * 128u + t + w];
#endif
      }
    }
  }
  if (lane != 0u || n >= p.n) return;
  for (uint r = 0u; r < ROWS; ++r) {
    if (row0 + r < live) {
#ifdef GATED
      finish(row0 + r, n, tree[r * 128u + t], tree[(4u + r) * 128u + t]);
#else
      finish(row0 + r, n, tree[r * 128u + t]);
#endif
    }
  }
}
