// Joins the partial records of head/partial over the whole vocabulary, in a fixed order.
#ifndef HORNITO_SOFTMAX_JOIN
#define HORNITO_SOFTMAX_JOIN

struct Joined {
  float largest;
  uint id;        // of the largest logit, the lowest one on ties
  float sum;      // of exp(logit - largest)
  float log_sum;
};

// Records [S, RUNS, 4] (largest, id, sum, unused) of row s; every thread of the workgroup must call.
Joined join_partials(uint t, Words partial, uint s, uint runs) {
  Joined j;
  j.largest = LOWEST;
  j.id = NO_ID;
  for (uint i = t; i < runs; i += 128u) {
    uint at = (s * runs + i) * 4u;
    float v = uintBitsToFloat(load_word(partial, at));
    if (j.id == NO_ID || v > j.largest) {
      j.largest = v;
      j.id = load_word(partial, at + 1u);
    }
  }
  reduce_best(t, j.largest, j.id);
  j.sum = 0.0;
  for (uint i = t; i < runs; i += 128u) {
    uint at = (s * runs + i) * 4u;
    j.sum += uintBitsToFloat(load_word(partial, at + 2u)) *
             exp(uintBitsToFloat(load_word(partial, at)) - j.largest);
  }
  j.sum = reduce_sum(t, j.sum);
  j.log_sum = log(j.sum);
  return j;
}

#endif
