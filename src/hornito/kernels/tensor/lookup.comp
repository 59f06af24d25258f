// Rows of a stored matrix chosen by indices: Gather along the first axis of a table in fewer bits. An
// index outside the table sets the node's status and gives zeros; negative ones count from the end.
//
// variant: f16 WEIGHT_F16
// variant: q WEIGHT_Q
//
// Geometry: 64 threads, eight numbers of the result each. Push: a table [p0, p1], b indices, result,
// status; count of eights of the result; node; p0 rows of the table; p1 numbers of a row, a multiple of
// eight.
// Specialisation (q): 7 FORMAT, 8 GROUP.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "tensor.glsl"
#include "weights.glsl"

layout(local_size_x = 64) in;

void main() {
  uint i = element();
  if (i >= p.count) return;
  uint eights = p.p1 / 8u;
  int row = int(load_word(p.b, i / eights));
  vec4 low = vec4(0.0), high = vec4(0.0);
  if (row < -int(p.p0) || row >= int(p.p0)) {
    report(STATUS_INDEX);
  } else {
    if (row < 0) row += int(p.p0);
    load_weights8(Matrix(p.a, p.p0, p.p1), uint(row), i % eights, low, high);
  }
  store_float4(Floats(uvec2(p.result)), 2u * i, low);
  store_float4(Floats(uvec2(p.result)), 2u * i + 1u, high);
}
