// Activation functions, chosen by number: 0 SiLU, 1 GELU (tanh form). Arguments of exp and tanh are
// clamped.
#ifndef HORNITO_ACTIVATION
#define HORNITO_ACTIVATION

float silu(float v) { return v / (1.0 + exp(clamp(-v, -80.0, 80.0))); }

float gelu_tanh(float v) {
  float inner = 0.7978845608028654 * (v + 0.044715 * v * v * v);
  return 0.5 * v * (1.0 + tanh(clamp(inner, -15.0, 15.0)));
}

float activate(uint kind, float v) { return kind == 0u ? silu(v) : gelu_tanh(v); }

#endif
