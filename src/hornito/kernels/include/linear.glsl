// What every linear kernel shares: the push block, and what is done with a finished sum. Outputs are n
// rows of the matrix from `first` on; `rows` counts all of them. `norm` and `eps` are of a norm that comes
// first, if any.
// out[r, n] = softcap(activation(sum_k x[r, k] * w[n, k] (+ bias[n])) (+ residual[r, n])); with
// GATED, the rows of w and bias are gate and up in turn, and out[r, n] = activation(gate) * up.
// Activation 15 is none; SOFTCAP 0 is none, else a value v becomes SOFTCAP * tanh(v / SOFTCAP).
#ifndef HORNITO_LINEAR
#define HORNITO_LINEAR

#include "activation.glsl"
#include "values.glsl"
#include "weights.glsl"

layout(constant_id = 0) const uint BIAS = 0u;
layout(constant_id = 1) const uint RESIDUAL = 0u;
layout(constant_id = 2) const uint ACTIVATION = 15u;
layout(constant_id = 6) const float SOFTCAP = 0.0;

layout(push_constant) uniform Push {
#ifdef JOINS
  Floats sums;     // of SPLITS parts of K, [SPLITS, pairs of weight rows, 2]
  Words counters;  // of tiles, all zero between dispatches
#endif
  Floats x;
  Words w;
  Floats bias;
  Floats residual;
  Floats result;
  Words call;
  Floats norm;
  uint live_word;
  uint n;
  uint k;
  uint first;
  uint rows;
  float eps;
} p;

// The matrix; output n is row `first + n` of it, or with GATED rows 2 n and 2 n + 1 behind `first`.
Matrix matrix() { return Matrix(p.w, p.rows, p.k); }

// Weight rows of one output: with GATED the gate row and, behind it, the up row.
#ifdef GATED
const uint OUTPUT_ROWS = 2u;
#else
const uint OUTPUT_ROWS = 1u;
#endif

// The weight row of output n (with GATED its gate row; the up row comes behind it).
uint weight_row(uint n) { return p.first + n * OUTPUT_ROWS; }

uint live_rows() { return load_word(p.call, p.live_word); }

#ifdef GATED
void finish(uint r, uint n, float gate, float up) {
  if (BIAS == 1u) {
    gate += load_float(p.bias, 2u * n);
    up += load_float(p.bias, 2u * n + 1u);
  }
  store_value(p.result, r * p.n + n, activate(ACTIVATION, gate) * up);
}
#else
void finish(uint r, uint n, float v) {
  if (BIAS == 1u) v += load_float(p.bias, n);
  if (ACTIVATION != 15u) v = activate(ACTIVATION, v);
  if (RESIDUAL == 1u) v += load_value(p.residual, r * p.n + n);
  if (SOFTCAP > 0.0) v = SOFTCAP * tanh(clamp(v / SOFTCAP, -15.0, 15.0));
  store_value(p.result, r * p.n + n, v);
}
#endif

#endif
