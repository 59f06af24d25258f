// The sums of kernels for few rows on GPUs: LANES threads share OUTS weight rows and stride through
// their weights, so that a row of x is loaded once for all of them; the threads' sums join in a fixed
// tree. With NORM, x is taken times the norm's weight, and the squares of x are summed on the way: the
// norm's factor comes out with the sums.
#ifndef HORNITO_GEMV
#define HORNITO_GEMV

#include "values.glsl"
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

// Of the kernel: the weight rows of this thread's group, and what becomes of their sums with row r of x,
// which are at tree[o * 128 + first thread of the group] then. Every thread calls both.
void group_rows(out uint rows[8]);
void row_end(uint r);

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
  float v = load_value(x, r * k + column);
  return NORM == 1u ? v * load_float(norm, column) : v;
}

// Adds two outliers of each weight row, times row r of x, to the sums from `to` on.
void add_outliers(Floats x, Floats norm, uint k, uint r, uint to) {
  vec2 v = vec2(x_at(x, norm, k, r, outlier_columns.x), x_at(x, norm, k, r, outlier_columns.y));
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[to + o] += dot(unpackHalf2x16(outliers[o]), v);
}
#endif

// Adds to a thread's sum at `at` those of `parts` - 1 others, `step` apart.
void join_parts(uint at, uint step, uint parts) {
  float all = tree[at];
  [[unroll]] for (uint i = 1u; i < 4u; ++i) {
    if (i < parts) all += tree[at + i * step];
  }
  tree[at] = all;
}

// Joins the threads' sums of row r of x. Every thread of the workgroup must call it; the sums are then
// at tree[o * 128 + first thread of the lanes].
void join_row(uint r) {
  uint t = gl_LocalInvocationID.x;
  barrier();
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) tree[o * 128u + t] = sum[r * OUTS + o];
  if (NORM == 1u) tree[SQUARES + t] = square[r];
  for (uint w = LANES; w > 1u;) {
    uint parts = min(w, 4u);
    w /= parts;
    barrier();
    if (t % LANES < w) {
      [[unroll]] for (uint o = 0u; o < OUTS; ++o) join_parts(o * 128u + t, w, parts);
      if (NORM == 1u) join_parts(SQUARES + t, w, parts);
    }
  }
  barrier();
}

// The factor of the row that was joined, of the lanes that begin at thread `first`.
float norm_factor(uint first, uint k, float eps) {
  if (NORM == 0u) return 1.0;
  return inversesqrt(tree[SQUARES + first] / float(k) + eps);
}

#include "gemv_floats.glsl"

#endif
