// 8x8 matrix products of a simdgroup.

#include <string.h>

#include "worker.h"

#pragma clang fp contract(fast)

namespace sim {

typedef float Row __attribute__((ext_vector_type(8)));

// c += a b. The sum over k takes k ^ order where it would take k.
static void multiply_add(float *c, const float *a, const float *b, unsigned order) {
  Row rows[8];
  for (unsigned k = 0; k < 8; k++) rows[k] = *(const Row *)(b + 8 * (k ^ order));
  for (unsigned i = 0; i < 8; i++) {
    Row sum = *(const Row *)(c + 8 * i);
    for (unsigned k = 0; k < 8; k++) sum = a[8 * i + (k ^ order)] * rows[k] + sum;
    *(Row *)(c + 8 * i) = sum;
  }
}

static void note(const void **known, int &count, const void *matrix) {
  for (int i = 0; i < count; i++)
    if (known[i] == matrix) return;
  if (count < MAX_MATRICES) known[count++] = matrix;
}

static bool is_counted(const Worker &w, const SimThread &thread) {
  return w.threadgroup_index == 0 && thread.thread_index_in_threadgroup == 0;
}

void finish_multiply(Worker &w, Simdgroup &group) {
  multiply_add(group.c, group.a, group.b, w.threadgroup.sum_order & 7);
}

void finish_flush(Worker &w, Simdgroup &group) {
  const unsigned order = w.threadgroup.sum_order & 7, count = group.fibers[0]->thread.pending;
  unsigned element[SIM_LANES];
  for (Fiber *fiber : group.fibers) {
    SimThread &thread = fiber->thread;
    if (thread.pending != count) {
      report_wait(DEADLOCK, *fiber, "lanes of one simdgroup run different numbers of simdgroup_matrix operations");
      abandon_launch(w);
    }
    thread.pending = 0;
    element[thread.thread_index_in_simdgroup] = thread.element;
  }
  alignas(64) float c[64];
  for (unsigned i = 0; i < count; i++) {
    float *const *accumulators = group.queue.accumulators[i];
    for (int lane = 0; lane < SIM_LANES; lane++) memcpy(c + element[lane], accumulators[lane], sizeof(SimPair));
    multiply_add(c, group.queue.a[i], group.queue.b[i], order);
    for (int lane = 0; lane < SIM_LANES; lane++) memcpy(accumulators[lane], c + element[lane], sizeof(SimPair));
    if (group.index == 0 && w.threadgroup_index == 0) note(w.accumulators, w.accumulator_count, accumulators[0]);
  }
}

}  // namespace sim

using namespace sim;

extern "C" {

SimPair sim_multiply(SimPair a, SimPair b, SimPair c, const void *destination, int counter) {
  Worker &w = *worker;
  SimThread &thread = w.current->thread;
  Simdgroup &group = *w.current->simdgroup;
  if (thread.thread_index_in_simdgroup == 0) w.counters[counter]++;
  if (is_counted(w, thread)) note(w.accumulators, w.accumulator_count, destination);
  *(SimPair *)(group.a + thread.element) = a;
  *(SimPair *)(group.b + thread.element) = b;
  *(SimPair *)(group.c + thread.element) = c;
  wait_for_simdgroup(Wait::multiply, 0, __builtin_return_address(0));
  return *(SimPair *)(group.c + thread.element);
}

void sim_flush(void) {
  if (worker->current->thread.pending) wait_for_simdgroup(Wait::flush, 0, __builtin_return_address(0));
}

void sim_note_matrix(const void *matrix) {
  Worker &w = *worker;
  if (is_counted(w, w.current->thread)) note(w.matrices, w.matrix_count, matrix);
}
}
