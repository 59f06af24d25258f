// Last pass of sampling: ends the filters exactly within the list, draws the token, ends the step, and
// finds the most likely tokens of the model's own distribution.
//
// The order of ids is: larger adjusted logit first, lower id first among equals. A filter keeps a
// prefix of that order; its end is found by a radix search over the bits of the logits. The draw is the
// inverse of the cumulative weight in the order of ids, at a 64-bit random number that depends on the
// seed and the row's position alone.
//
// Geometry: 128 threads, one workgroup a row (x).
// Push: addresses of the row records, selection [S], raw and adjusted [S, 1024 RUNS], partial, cut (the
// end that was found replaces what was wanted), list [S, RUNS, 1024], parameters [S, 16], counts
// [slots, V], EOS ids, records out (step.glsl), top out [S, RING, 20, 2] (id, log-probability; id NO_ID: none), the call header; live_word, runs, count
// of EOS ids, ring, ids of the vocabulary.
// Specialisation: 1 UPDATE (1: advance the row).
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 128) in;
layout(constant_id = 1) const uint UPDATE = 0u;

#include "memory.glsl"

layout(push_constant) uniform Push {
  Words rows;
  Words selection;
  Floats raw;
  Floats adjusted;
  Words partial;
  Words cut;
  Words list;
  Words params;
  Words counts;
  Words eos;
  Words records;
  Words top;
  Words call;
  uint live_word;
  uint runs;
  uint eos_count;
  uint ring;
  uint vocabulary;
} p;

#include "philox.glsl"
#include "reduce.glsl"
#include "sampling.glsl"
#include "step.glsl"

const uint MOST_RUNS = 512u;
const uint EACH = RUN / 128u;

shared uint ids_in[256];
shared uint low_in[256];
shared uint high_in[256];
shared uint found;
shared uvec2 found_before;
shared float run_value[MOST_RUNS];
shared uint run_id[MOST_RUNS];

// What the filters keep: everything before and including this place of the order.
uint end_order;
uint end_id;

bool keeps(uint order, uint id) { return order > end_order || (order == end_order && id <= end_id); }

uint order_at(uint s, uint id) { return order_of(load_float(p.adjusted, s * p.runs * RUN + id)); }

uint weight_at(uint s, uint id, float largest, float scale) {
  return weight_of(distance_of(largest, load_float(p.adjusted, s * p.runs * RUN + id), scale));
}

// The runs whose lists belong to thread t.
uint first_run(uint t) { return min(t * ((p.runs + 127u) / 128u), p.runs); }

uint list_length(uint s, uint run) { return load_word(p.partial, partial_at(s, p.runs, run) + 7u); }

uint list_id(uint s, uint run, uint i) { return load_word(p.list, (s * p.runs + run) * RUN + i); }

// Moves the end to where the list's ids, in their order, reach `wanted`: in number, or (BY_WEIGHT) in
// weight.
void end_filter(uint t, uint s, bool by_weight, uvec2 wanted, float largest, float scale) {
  uint order = 0u, mask = 0u;
  [[dont_unroll]] for (uint shift = 24u;; shift -= 8u) {
    barrier();
    for (uint d = t; d < 256u; d += 128u) {
      ids_in[d] = 0u;
      low_in[d] = 0u;
      high_in[d] = 0u;
    }
    barrier();
    for (uint run = first_run(t); run < first_run(t + 1u); ++run) {
      uint n = list_length(s, run);
      for (uint i = 0u; i < n; ++i) {
        uint id = list_id(s, run, i);
        uint o = order_at(s, id);
        if (((o ^ order) & mask) == 0u && keeps(o, id)) {
          uint digit = (o >> shift) & 255u;
          atomicAdd(ids_in[digit], 1u);
          uint w = by_weight ? weight_at(s, id, largest, scale) : 0u;
          if (w > 0u && w > ~atomicAdd(low_in[digit], w)) atomicAdd(high_in[digit], 1u);
        }
      }
    }
    barrier();
    uint high = 255u - 2u * t, low = high - 1u;  // this thread's digits, the larger first
    uvec2 a = by_weight ? uvec2(low_in[high], high_in[high]) : uvec2(ids_in[high], 0u);
    uvec2 b = by_weight ? uvec2(low_in[low], high_in[low]) : uvec2(ids_in[low], 0u);
    uvec2 reached = scan64(t, add64(a, b));
    uvec2 before = sub64(reached, add64(a, b));
    if (less64(before, wanted) && !less64(reached, wanted)) {
      bool in_first = !less64(add64(before, a), wanted);
      found = in_first ? high : low;
      found_before = in_first ? before : add64(before, a);
    }
    barrier();
    wanted = sub64(wanted, found_before);
    order |= found << shift;
    mask |= 255u << shift;
    if (shift == 0u) break;
  }
  uint equal = ids_in[found];
  uint needed = wanted.x;
  if (by_weight) {  // the least number of equal weights that reaches what is wanted
    uint w = weight_of(distance_of(
        largest, uintBitsToFloat((order & 0x80000000u) != 0u ? order ^ 0x80000000u : ~order), scale));
    uint least = 1u;
    uint most = equal;
    while (least < most) {
      uint middle = (least + most) / 2u;
      if (less64(times64(middle, w), wanted)) least = middle + 1u;
      else most = middle;
    }
    needed = least;
  }
  uint last_id = NO_ID;
  if (needed < equal) {
    uint own = 0u;
    for (uint run = first_run(t); run < first_run(t + 1u); ++run) {
      uint n = list_length(s, run);
      for (uint i = 0u; i < n; ++i) own += order_at(s, list_id(s, run, i)) == order ? 1u : 0u;
    }
    uint before = scan64(t, uvec2(own, 0u)).x - own;
    if (before < needed && needed <= before + own) {
      for (uint run = first_run(t); run < first_run(t + 1u); ++run) {
        uint n = list_length(s, run);
        for (uint i = 0u; i < n; ++i) {
          uint id = list_id(s, run, i);
          if (order_at(s, id) == order) {
            before += 1u;
            if (before == needed) found = id;
          }
        }
      }
    }
    barrier();
    last_id = found;
  } else if (order == end_order) {
    last_id = end_id;
  }
  end_order = order;
  end_id = last_id;
}

// Weight of the ids in a run's list that the filters keep, of those with `least` at least.
uvec2 listed_weight(uint s, uint run, uint least, float largest, float scale) {
  uvec2 sum = uvec2(0u);
  uint n = list_length(s, run);
  for (uint i = 0u; i < n; ++i) {
    uint id = list_id(s, run, i);
    if (keeps(order_at(s, id), id)) {
      uint w = weight_at(s, id, largest, scale);
      if (w >= least) sum = add64(sum, w);
    }
  }
  return sum;
}

// Weight of the ids of a run that can be drawn.
uvec2 run_weight(uint s, uint run, float largest, Sampling q) {
  uint at = partial_at(s, p.runs, run);
  uvec2 others = uvec2(load_word(p.partial, at + 5u), load_word(p.partial, at + 6u));
  return add64(others, listed_weight(s, run, q.least, largest, q.scale));
}

// The weight that top-p wants of what top-k, if it `cut`, left.
uvec2 wanted_weight(uint t, uint s, bool cut, float largest, Sampling q) {
  uint at = cut_at(s);
  uvec2 all = uvec2(load_word(p.cut, at + 6u), load_word(p.cut, at + 7u));
  if (cut) {
    uvec2 own = uvec2(0u);
    for (uint run = first_run(t); run < first_run(t + 1u); ++run) {
      own = add64(own, listed_weight(s, run, 0u, largest, q.scale));
    }
    scan64(t, own);
    all = scan_sum[127];
  }
  uvec2 target = scale32(all, q.top_p);
  if (target == uvec2(0u)) target = uvec2(1u, 0u);
  return sub64(target, uvec2(load_word(p.cut, at + 4u), load_word(p.cut, at + 5u)));
}

void run_filters(uint t, uint s, float largest, Sampling q) {
  end_order = 0u;
  end_id = NO_ID;
  uint at = cut_at(s);
  if (load_word(p.cut, at) == BINS) return;
  uvec2 wanted = uvec2(load_word(p.cut, at + 2u), 0u);
  bool top_k = wanted.x > 0u;
  bool top_p = (q.flags & SAMPLE_TOP_P) != 0u;
  // One piece of code for both: drivers that compile with LLVM take seconds for each barrier twice.
  [[dont_unroll]] for (uint pass = top_k ? 0u : 1u; pass < (top_p ? 2u : 1u); ++pass) {
    if (pass == 1u) wanted = wanted_weight(t, s, top_k, largest, q);
    end_filter(t, s, pass == 1u, wanted, largest, q.scale);
  }
}

// The id at a random place of the cumulative weight.
uint draw(uint t, uint s, uint position, float largest, Sampling q) {
  uvec2 own = uvec2(0u);
  for (uint run = first_run(t); run < first_run(t + 1u); ++run) {
    own = add64(own, run_weight(s, run, largest, q));
  }
  uvec2 reached = scan64(t, own);
  uvec2 place = scale64(scan_sum[127], philox(uvec4(position, 0u, 0u, 0u), q.seed).xy);
  uvec2 sum = sub64(reached, own);
  if (!less64(place, sum) && less64(place, reached)) {
    for (uint run = first_run(t); run < first_run(t + 1u); ++run) {
      uvec2 next = add64(sum, run_weight(s, run, largest, q));
      if (!less64(place, sum) && less64(place, next)) {
        found = run;
        found_before = sum;
      }
      sum = next;
    }
  }
  barrier();
  uint run = found;
  place = sub64(place, found_before);
  uint from = min(run * RUN + t * EACH, p.vocabulary);
  uint to = min(from + EACH, p.vocabulary);
  own = uvec2(0u);
  for (uint id = from; id < to; ++id) {
    uint w = weight_at(s, id, largest, q.scale);
    if (w >= q.least && keeps(order_at(s, id), id)) own = add64(own, w);
  }
  reached = scan64(t, own);
  sum = sub64(reached, own);
  if (!less64(place, sum) && less64(place, reached)) {
    for (uint id = from; id < to; ++id) {
      uint w = weight_at(s, id, largest, q.scale);
      if (w >= q.least && keeps(order_at(s, id), id)) {
        uvec2 next = add64(sum, w);
        if (!less64(place, sum) && less64(place, next)) found = id;
        sum = next;
      }
    }
  }
  barrier();
  return found;
}

// The n most likely tokens by raw logit: the best of all runs, n times, each followed by a new look
// at the run that it came from.
void store_top(uint t, uint s, uint emitted, uint n, float log_sum) {
  for (uint run = t; run < p.runs; run += 128u) {
    run_value[run] = uintBitsToFloat(load_word(p.partial, partial_at(s, p.runs, run)));
    run_id[run] = load_word(p.partial, partial_at(s, p.runs, run) + 1u);
  }
  for (uint k = 0u; k < n; ++k) {
    barrier();
    float best = LOWEST;
    uint id = NO_ID;
    for (uint run = t; run < p.runs; run += 128u) {
      if (run_id[run] != NO_ID && (id == NO_ID || run_value[run] > best)) {
        best = run_value[run];
        id = run_id[run];
      }
    }
    reduce_best(t, best, id);
    if (t == 0u) {
      uint at = ((s * p.ring + emitted % p.ring) * MOST_TOP + k) * 2u;
      store_word(p.top, at, id);
      store_word(p.top, at + 1u, floatBitsToUint(best - log_sum));
    }
    if (id == NO_ID) continue;
    uint run = id / RUN;
    float next = LOWEST;
    uint next_id = NO_ID;
    for (uint i = run * RUN + t; i < min(run * RUN + RUN, p.vocabulary); i += 128u) {
      float v = load_float(p.raw, s * p.runs * RUN + i);
      bool later = v < best || (v == best && i > id);
      if (later && (next_id == NO_ID || v > next)) {
        next = v;
        next_id = i;
      }
    }
    reduce_best(t, next, next_id);
    if (t == 0u) {
      run_value[run] = next;
      run_id[run] = next_id;
    }
  }
}

void main() {
  uint t = gl_LocalInvocationID.x;
  uint s = gl_WorkGroupID.x;
  if (s >= load_word(p.call, p.live_word)) return;
  uint r = load_word(p.selection, s);
  uvec4 row = load_words4(p.rows, 2u * r);
  uvec4 more = load_words4(p.rows, 2u * r + 1u);
  if ((row.w & ROW_LIVE) == 0u) return;
  Sampling q = load_sampling(p.params, s);

  float best = LOWEST, largest = LOWEST;
  uint id = NO_ID, token = NO_ID;
  for (uint i = t; i < p.runs; i += 128u) {
    uint at = partial_at(s, p.runs, i);
    float v = uintBitsToFloat(load_word(p.partial, at));
    float a = uintBitsToFloat(load_word(p.partial, at + 3u));
    if (id == NO_ID || v > best) {
      best = v;
      id = load_word(p.partial, at + 1u);
    }
    if (token == NO_ID || a > largest) {
      largest = a;
      token = load_word(p.partial, at + 4u);
    }
  }
  reduce_best(t, best, id);
  reduce_best(t, largest, token);
  float sum = 0.0;
  for (uint i = t; i < p.runs; i += 128u) {
    uint at = partial_at(s, p.runs, i);
    sum += uintBitsToFloat(load_word(p.partial, at + 2u)) *
           exp(uintBitsToFloat(load_word(p.partial, at)) - best);
  }
  sum = reduce_sum(t, sum);
  float log_sum = best + log(sum);
  if (isnan(sum) || isinf(best) || token == NO_ID) {
    token = NOT_A_NUMBER;
  } else if ((q.flags & SAMPLE_GREEDY) == 0u) {
    run_filters(t, s, largest, q);
    token = draw(t, s, row.y, largest, q);
    if (t == 0u) {
      store_word(p.cut, cut_at(s) + 2u, end_order);
      store_word(p.cut, cut_at(s) + 3u, end_id);
    }
  }
  if (token != NOT_A_NUMBER && q.top_n > 0u) store_top(t, s, more.y, q.top_n, log_sum);
  if (t != 0u) return;
  float logprob = 0.0;
  if (token != NOT_A_NUMBER) {
    logprob = load_float(p.raw, s * p.runs * RUN + token) - best - log(sum);
    if ((q.flags & SAMPLE_PENALTIES) != 0u) {
      uint at = row.z * p.vocabulary + token;
      store_word(p.counts, at, load_word(p.counts, at) + 1u);
    }
  }
  finish_step(s, r, row, more, token, logprob);
}
