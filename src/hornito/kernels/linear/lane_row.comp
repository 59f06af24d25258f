// Linear for software drivers without usable subgroups, and for K that is no multiple of 8: a lane owns
// an output row and walks its weights once for ROWS rows of x. Plain twin of broadcast.comp.
//
// variant: f32
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
// variant: gated_f32 GATED
// variant: gated_f16 GATED WEIGHT_F16
// variant: gated_q GATED WEIGHT_Q
//
// Geometry: 64 threads, one output row n each (x); ROWS rows of x a workgroup (y).
// Push: see linear.glsl.
// Specialisation: 0 BIAS, 1 RESIDUAL, 2 ACTIVATION, 3 ROWS (1 to 4), 4 WIDE (K is a multiple of 8),
// 6 SOFTCAP, 7 FORMAT, 8 GROUP, 9 OUTLIERS.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "linear.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint WIDE = 1u;

// Eight numbers of row r of x, from x_column(8 * i8) on; x begins at row 0 and has m.k columns.
void load_x8(Matrix m, Floats x, uint r, uint i8, out vec4 a, out vec4 b) {
#ifdef WEIGHT_Q
  if (OUTLIERS > 0u && i8 >= m.k / 8u) {
    for (uint e = 0u; e < 4u; ++e) {
      a[e] = load_value(x, r * m.k + x_column(m, 8u * i8 + e));
      b[e] = load_value(x, r * m.k + x_column(m, 8u * i8 + 4u + e));
    }
    return;
  }
#endif
  uint at = 2u * (r * (m.k / 8u) + i8);
  a = load_value4(x, at);
  b = load_value4(x, at + 1u);
}

void add8(inout float sum, vec4 a, vec4 b, vec4 x, vec4 y) {
  sum = fma(a.x, x.x, sum);
  sum = fma(a.y, x.y, sum);
  sum = fma(a.z, x.z, sum);
  sum = fma(a.w, x.w, sum);
  sum = fma(b.x, y.x, sum);
  sum = fma(b.y, y.y, sum);
  sum = fma(b.z, y.z, sum);
  sum = fma(b.w, y.w, sum);
}

void main() {
  uint n = gl_GlobalInvocationID.x;
  uint row0 = gl_WorkGroupID.y * ROWS;
  uint live = live_rows();
  if (row0 >= live) return;
  // Lanes past the last output row repeat it, so that loads of x stay uniform.
  uint own = weight_row(min(n, p.n - 1u));
  Matrix m = matrix();
  float sum[4];
#ifdef GATED
  float up[4];
#endif
  [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
    sum[r] = 0.0;
#ifdef GATED
    up[r] = 0.0;
#endif
  }
  if (WIDE == 1u) {
    for (uint i = 0u; i < walked(m) / 8u; ++i) {
      vec4 a, b;
      load_weights8(m, own, i, a, b);
#ifdef GATED
      vec4 c, d;
      load_weights8(m, own + 1u, i, c, d);
#endif
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        vec4 x, y;
        load_x8(m, p.x, row0 + r, i, x, y);
        add8(sum[r], a, b, x, y);
#ifdef GATED
        add8(up[r], c, d, x, y);
#endif
      }
    }
  } else {
    for (uint i = 0u; i < p.k; ++i) {
      float a = load_weight(m, own, i);
#ifdef GATED
      float c = load_weight(m, own + 1u, i);
#endif
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        float x = load_value(p.x, (row0 + r) * p.k + i);
        sum[r] = fma(a, x, sum[r]);
#ifdef GATED
        up[r] = fma(c, x, up[r]);
#endif
      }
    }
  }
  if (n >= p.n) return;
  [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
    if (row0 + r < live) {
#ifdef GATED
      finish(row0 + r, n, sum[r], up[r]);
#else
      finish(row0 + r, n, sum[r]);
#endif
    }
  }
}
