// From one fused row [q; k; v]: RMS norm of every head of q and k (by one weight each), rotation of
// both, q into its own buffer, k and v into the slot's KV block. Twin of rms_norm over heads (twice),
// rope (twice) and kv_append; the same arithmetic. R/2 may be 0: no rotation.
//
// variant: kv32
// variant: kv16 KV_F16
//
// Geometry: 128 threads, one workgroup a head (x: heads + 2 kv_heads) and row (y). The sum is a fixed
// tree, the one of rms_norm. Each thread stores pairs of neighbouring dims i, i + 1 and their
// partners in the other half (the partner of a dim past R is none). R/2 and D are even, D <= 256.
// Push: addresses of the row records, block table, qkv [T, (heads + 2 kv_heads) * D], inv_freq [R/2]
// (or anything), norm weights of q and k [D], q out [T, heads, D]; table stride, layer, heads,
// kv_heads, D, R/2, scale of sine and cosine, eps.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "kv.glsl"
#include "rope.glsl"
#include "squares.glsl"
#include "values.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
  Words rows;
  Addresses table;
  Floats qkv;
  Floats inv_freq;
  Floats q_norm;
  Floats k_norm;
  Floats q;
  uint table_stride;
  uint layer;
  uint heads;
  uint kv_heads;
  uint head_dim;
  uint half_dim;
  float scale;
  float eps;
} p;

shared float partial[128];
shared float normed[256];

void main() {
  uint t = gl_LocalInvocationID.x;
  uint head = gl_WorkGroupID.x;
  uint r = gl_WorkGroupID.y;
  Row row = load_row(p.rows, r);
  if (!row.live) return;
  bool is_query = head < p.heads;
  bool is_value = head >= p.heads + p.kv_heads;
  uint from = (r * (p.heads + 2u * p.kv_heads) + head) * p.head_dim;

  float factor = 1.0;
  if (!is_value) {
    partial[t] = squares(p.qkv, from, p.head_dim, t);
    [[dont_unroll]] for (uint half_width = 64u; half_width > 0u; half_width >>= 1) {
      barrier();
      if (t < half_width) partial[t] += partial[t + half_width];
    }
    barrier();
    factor = inversesqrt(partial[0] / float(p.head_dim) + p.eps);
  }
  for (uint i = t; i < p.head_dim; i += 128u) {
    float v = load_value(p.qkv, from + i);
    if (is_query) {
      v = v * factor * load_float(p.q_norm, i);
    } else if (!is_value) {
      v = v * factor * load_float(p.k_norm, i);
    }
    normed[i] = v;
  }
  barrier();

  // Pairs of dims: those that turn stand for two pairs, those past R for one.
  uint turning = p.half_dim / 2u;
  uint pairs = turning + (p.head_dim - 2u * p.half_dim) / 2u;
  uint side = is_value ? 1u : 0u;
  uint kv_head = is_query ? 0u : head - p.heads - side * p.kv_heads;
  Words block = Words(kv_block(p.table, p.table_stride, row.slot, row.position));
  uint to_kv = kv_index(p.layer, side, kv_head, p.kv_heads, row.position, p.head_dim);
  uint to_q = (r * p.heads + head) * p.head_dim;
  for (uint pair = t; pair < pairs; pair += 128u) {
    bool turn = pair < turning;
    uint i = turn ? 2u * pair : 2u * p.half_dim + 2u * (pair - turning);
    uint j = turn ? i + p.half_dim : i;
    vec2 lo = vec2(normed[i], normed[i + 1u]);
    vec2 hi = vec2(normed[j], normed[j + 1u]);
    if (turn && !is_value) {
      vec2 t0 = sin_cos(float(row.position) * load_float(p.inv_freq, i)) * p.scale;
      vec2 t1 = sin_cos(float(row.position) * load_float(p.inv_freq, i + 1u)) * p.scale;
      vec2 s = vec2(t0.x, t1.x);
      vec2 c = vec2(t0.y, t1.y);
      vec2 a = lo;
      lo = a * c - hi * s;
      hi = hi * c + a * s;
    }
    if (is_query) {
      store_value2(p.q, to_q + i, lo);
      store_value2(p.q, to_q + j, hi);
    } else {
      store_kv2(block, to_kv + i, lo.x, lo.y);
      store_kv2(block, to_kv + j, hi.x, hi.y);
    }
  }
}
