// The sums of kernels for few rows on GPUs: LANES threads share OUTS weight rows and stride through
// their weights, so that a row of x is loaded once for all of them; the threads' sums join in a fixed
// order: by shuffles and then over subgroups, or with TREE in shared memory, which every device can. With
// NORM, x is taken times the norm's weight, and the squares of x are summed on the way: the norm's factor
// comes out with the sums.
#ifndef HORNITO_GEMV
#define HORNITO_GEMV

#ifdef TREE
uint thread() { return gl_LocalInvocationID.x; }
#else
#extension GL_KHR_shader_subgroup_shuffle : require
#include "threads.glsl"
#endif
#include "normed.glsl"
#include "weights.glsl"

layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint WIDE = 1u;
layout(constant_id = 5) const uint LANES = 32u;
layout(constant_id = 11) const uint OUTS = 1u;

// Sums of one row of x and of its squares, [weight row, or SQUARES][part]: of subgroups of four threads at
// least, or of groups where these are smaller; with TREE of threads.
#ifdef TREE
const uint PARTS = 128u;
#else
const uint PARTS = 32u;
#endif
const uint SQUARES = 8u;
shared float parts[9u * PARTS];

// [row of x * OUTS + weight row], and [row of x]; of this thread. OUTS is 8 for one row only.
float sum[16];
float square[4];

// Of the kernel: the weight rows of this thread's group, and what becomes of their sums with row r of x,
// which are joined() then. Every thread calls both.
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

// Adds two outliers of each weight row, times row r of x, to the sums from `to` on.
void add_outliers(Floats x, Floats norm, uint k, uint r, uint to) {
  vec2 v = vec2(x_at(x, norm, r * k, outlier_columns.x), x_at(x, norm, r * k, outlier_columns.y));
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) sum[to + o] += dot(unpackHalf2x16(outliers[o]), v);
}
#endif

#ifdef TREE
// Joins the threads' sums of row r of x. Every thread of the workgroup must call it.
void join_row(uint r) {
  if (r > 0u) barrier();  // the row before was ended
  uint t = thread();
  [[unroll]] for (uint o = 0u; o < OUTS; ++o) parts[o * PARTS + t] = sum[r * OUTS + o];
  if (NORM == 1u) parts[SQUARES * PARTS + t] = square[r];
  [[dont_unroll]] for (uint w = LANES / 2u; w > 0u; w >>= 1) {
    barrier();
    if (t % LANES >= w) continue;
    [[unroll]] for (uint o = 0u; o < OUTS; ++o) parts[o * PARTS + t] += parts[o * PARTS + t + w];
    if (NORM == 1u) parts[SQUARES * PARTS + t] += parts[SQUARES * PARTS + t + w];
  }
  barrier();
}

// The sum of weight row o of a group with the row that was joined, or that of its squares.
float joined(uint group, uint o) { return parts[o * PARTS + group * LANES]; }
#else
// Threads whose sums join by shuffles.
uint span() { return min(LANES, gl_SubgroupSize); }

// Joins the threads' sums of row r of x. Every thread of the workgroup must call it.
void join_row(uint r) {
  [[unroll]] for (uint w = LANES / 2u; w > 0u; w >>= 1) {
    if (w >= gl_SubgroupSize) continue;
    [[unroll]] for (uint o = 0u; o < OUTS; ++o) {
      sum[r * OUTS + o] += subgroupShuffleXor(sum[r * OUTS + o], w);
    }
    if (NORM == 1u) square[r] += subgroupShuffleXor(square[r], w);
  }
  if (r > 0u) barrier();  // the row before was ended
  uint t = thread();
  if (t % span() == 0u) {
    [[unroll]] for (uint o = 0u; o < OUTS; ++o) parts[o * PARTS + t / span()] = sum[r * OUTS + o];
    if (NORM == 1u) parts[SQUARES * PARTS + t / span()] = square[r];
  }
  barrier();
}

// The sum of weight row o of a group with the row that was joined, or that of its squares.
float joined(uint group, uint o) {
  uint count = LANES / span();
  uint at = o * PARTS + group * count;
  float all = parts[at];
  for (uint i = 1u; i < count; ++i) all += parts[at + i];
  return all;
}
#endif

// The norm's factor of that row, from a group's squares.
float norm_factor(uint group, uint k, float eps) {
  return NORM == 0u ? 1.0 : inversesqrt(joined(group, SQUARES) / float(k) + eps);
}

#include "gemv_floats.glsl"

#endif
