// A row of x behind a norm: with NORM its numbers count times the norm's weight, and the norm's factor comes
// with the sums.
#ifndef HORNITO_NORMED
#define HORNITO_NORMED

#include "values.glsl"

layout(constant_id = 10) const uint NORM = 0u;

// A column of the row that begins at number `row` of x, times the norm's weight.
float x_at(Floats x, Floats norm, uint row, uint column) {
  float v = load_value(x, row + column);
  return NORM == 1u ? v * load_float(norm, column) : v;
}

#endif
