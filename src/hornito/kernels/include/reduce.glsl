// Reductions over the 128 threads of a workgroup, in a fixed order. Every thread must call them; the
// result is the same in every thread.
#ifndef HORNITO_REDUCE
#define HORNITO_REDUCE

#extension GL_EXT_control_flow_attributes : require

const float LOWEST = -3.4e38;
const uint NO_ID = 0xffffffffu;

shared float reduce_value[128];
shared uint reduce_id[128];

// The largest value and its id, the lowest id on ties. A thread without a value has NO_ID.
void reduce_best(uint t, inout float value, inout uint id) {
  barrier();
  reduce_value[t] = value;
  reduce_id[t] = id;
  [[dont_unroll]] for (uint w = 64u; w > 0u; w >>= 1) {
    barrier();
    if (t < w) {
      float other = reduce_value[t + w];
      if (other > reduce_value[t] ||
          (other == reduce_value[t] && reduce_id[t + w] < reduce_id[t])) {
        reduce_value[t] = other;
        reduce_id[t] = reduce_id[t + w];
      }
    }
  }
  barrier();
  value = reduce_value[0];
  id = reduce_id[0];
}

float reduce_sum(uint t, float value) {
  barrier();
  reduce_value[t] = value;
  [[dont_unroll]] for (uint w = 64u; w > 0u; w >>= 1) {
    barrier();
    if (t < w) reduce_value[t] += reduce_value[t + w];
  }
  barrier();
  return reduce_value[0];
}

#endif
