// Rows of a [rows, width] normalised, fp32: softmax, its logarithm, hardmax, layer and RMS norm.
//
// Geometry: a workgroup of 64 threads a row; sums in a fixed order.
// Push: a, result; count of rows; p0 width; x epsilon of the norms. Constant 0: the operator.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "tensor.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint OP = 0u;

const uint SOFTMAX = 0u;
const uint LOG_SOFTMAX = 1u;
const uint HARDMAX = 2u;
const uint LAYER_NORM = 3u;
const uint RMS_NORM = 4u;

shared float part[64];
shared uint index_of[64];

float value(uint i) { return uintBitsToFloat(load_word(p.a, i)); }

float row_sum(uint t, float v) {
  barrier();
  part[t] = v;
  [[dont_unroll]] for (uint half_size = 32u; half_size > 0u; half_size >>= 1) {
    barrier();
    if (t < half_size) part[t] += part[t + half_size];
  }
  barrier();
  return part[0];
}

// The largest value of the row and, in index_of[0], where it is first.
float row_max(uint t, uint base) {
  float best = uintBitsToFloat(INFINITY | 0x80000000u);
  uint at = p.p0;
  for (uint i = t; i < p.p0; i += 64u) {
    float v = value(base + i);
    if (at == p.p0 || v > best) {
      best = v;
      at = i;
    }
  }
  part[t] = best;
  index_of[t] = at;
  [[dont_unroll]] for (uint half_size = 32u; half_size > 0u; half_size >>= 1) {
    barrier();
    if (t < half_size) {
      uint o = t + half_size;
      if (part[o] > part[t] || (part[o] == part[t] && index_of[o] < index_of[t])) {
        part[t] = part[o];
        index_of[t] = index_of[o];
      }
    }
  }
  barrier();
  return part[0];
}

void store(uint i, float v) { store_word(p.result, i, floatBitsToUint(v)); }

void main() {
  uint row = this_row();
  uint t = gl_LocalInvocationIndex;
  if (row >= p.count) return;
  uint base = row * p.p0;
  if (OP == SOFTMAX || OP == LOG_SOFTMAX || OP == HARDMAX) {
    float top = row_max(t, base);
    if (OP == HARDMAX) {
      uint at = index_of[0];
      for (uint i = t; i < p.p0; i += 64u) store(base + i, i == at ? 1.0 : 0.0);
      return;
    }
    float sum = 0.0;
    for (uint i = t; i < p.p0; i += 64u) sum += exp(value(base + i) - top);
    sum = row_sum(t, sum);
    float shift = log(sum);
    for (uint i = t; i < p.p0; i += 64u) {
      float v = value(base + i) - top;
      store(base + i, OP == SOFTMAX ? exp(v) / sum : v - shift);
    }
    return;
  }
  float mean = 0.0;
  if (OP == LAYER_NORM) {
    float sum = 0.0;
    for (uint i = t; i < p.p0; i += 64u) sum += value(base + i);
    mean = row_sum(t, sum) / float(p.p0);
  }
  float squares = 0.0;
  for (uint i = t; i < p.p0; i += 64u) {
    float v = value(base + i) - mean;
    squares += v * v;
  }
  float scale = 1.0 / sqrt(row_sum(t, squares) / float(p.p0) + p.x);
  for (uint i = t; i < p.p0; i += 64u) store(base + i, (value(base + i) - mean) * scale);
}
