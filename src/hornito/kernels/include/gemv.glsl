// The sums of kernels for few rows on GPUs: LANES threads share OUTS weight rows and stride through
// their weights, so that a row of x is loaded once for all of them; the threads' sums join in a fixed
// tree. With NORM, x is taken times the norm's weight, and the squares of x are summed on the way: the
// norm's factor comes out with the sums.
#ifndef HORNITO_GEMV
#define HORNITO_GEMV

#include "weights.glsl"

layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint WIDE = 1u;
layout(constant_id = 5) const uint LANES = 32u;
layout(constant_id = 11) const uint OUTS = 1u;
layout(constant_id = 10) const uint NORM = 0u;

// Every thread's sums of one row of x, and of its squares: [weight row, or 8][thread].
shared float tree[128 * 9];
const uint SQUARES = 128u * 8u;

// [row of x * OUTS + weight row], and [row of x]; of this thread. OUTS is 8 for one row only.
float sum[16];
float square[4];

#ifdef DIGITS
#include "gemv_digits.glsl"
#else
#include "gemv_floats.glsl"
#endif

#ifdef WEIGHT_Q
// Two outliers of each weight row, and their columns of x.
uint outliers[8];
uvec2 outlier_columns;

// Those from 2 * i on, or the last ones.
void fetch_outliers(Matrix m, uint weight[8], uint i) {
  i = min(i, OUTLIERS / 2u - 1u);
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) outliers[o] = load_outliers2(m, weight[o], i);
  outlier_columns = load_outlier_columns2(m, i);
}

// A number of row r of x, times the norm's weight.
float x_at(Floats x, Floats norm, uint k, uint r, uint column) {
  float v = load_float(x, r * k + column);
  return NORM == 1u ? v * load_float(norm, column) : v;
}
#endif

// Adds up this thread's part of the sums of the weight rows `weight[0 .. OUTS)` with ROWS rows of x from
// row0 on.
void sum_rows(Floats x, Floats norm, Matrix m, uint row0, uint weight[8]) {
  uint lane = gl_LocalInvocationID.x % LANES;
  [[unroll]] for (uint i = 0u; i < ROWS * OUTS; ++i) sum[i] = 0.0;
  [[unroll]] for (uint i = 0u; i < ROWS; ++i) square[i] = 0.0;
  if (WIDE == 1u) {
#ifdef WEIGHT_Q
    // On their way while the rest of the rows is multiplied.
    if (OUTLIERS > 0u) fetch_outliers(m, weight, lane);
#endif
    sum_chunks(x, norm, m, row0, weight);
#ifdef WEIGHT_Q
    if (OUTLIERS > 0u) {
      for (uint i = lane; i < OUTLIERS / 2u; i += LANES) {
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
          vec2 v = vec2(x_at(x, norm, m.k, row0 + r, outlier_columns.x),
                        x_at(x, norm, m.k, row0 + r, outlier_columns.y));
          [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
            sum[r * OUTS + o] += dot(unpackHalf2x16(outliers[o]), v);
          }
        }
        fetch_outliers(m, weight, i + LANES);
      }
    }
#endif
  } else {
    for (uint i = lane; i < m.k; i += LANES) {
      float w[8];
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) w[o] = load_weight(m, weight[o], i);
      [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        float v = load_float(x, (row0 + r) * m.k + i);
        if (NORM == 1u) {
          square[r] += v * v;
          v *= load_float(norm, i);
        }
        [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[r * OUTS + o] += w[o] * v;
      }
    }
  }
}

// Joins the threads' sums of row r of x. Every thread of the workgroup must call it; the sums are then
// at tree[o * 128 + first thread of the lanes].
void join_row(uint r) {
  uint t = gl_LocalInvocationID.x;
  barrier();
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) tree[o * 128u + t] = sum[r * OUTS + o];
  if (NORM == 1u) tree[SQUARES + t] = square[r];
  for (uint w = (NORM == 1u ? SQUARE_LANES : LANES) / 2u; w > 0u; w >>= 1) {
    barrier();
    if (w < LANES && t % LANES < w) {
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) tree[o * 128u + t] += tree[o * 128u + t + w];
    }
    if (NORM == 1u && t % SQUARE_LANES < w) tree[SQUARES + t] += tree[SQUARES + t + w];
  }
  barrier();
}

// The factor of the row that was joined, of the lanes that begin at thread `first`.
float norm_factor(uint first, uint k, float eps) {
  return NORM == 1u ? inversesqrt(tree[SQUARES + first / SQUARE_LANES * SQUARE_LANES] / float(k) + eps) : 1.0;
}

#endif
