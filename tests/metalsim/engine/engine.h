// What compiled Metal kernels and the engine that runs them agree on.
//
// A kernel source becomes a shared library of its own (tests/metalsim/build.py). It exports one table,
// `sim_library`, that lists its kernels and function constants, and calls the sim_* functions below, which
// it finds in the engine's library by symbol lookup. Load the engine first, with RTLD_GLOBAL.
//
// No system header is included, so that generated code compiles in a fraction of a second.
//
// Two kinds of build, told apart by the macro SIM_CHECKED:
//   fast     matrix products are queued (sim_queue_multiply); accesses go unseen; guard pages still catch overruns.
//   checked  products block (sim_multiply); clang's ThreadSanitizer instrumentation calls the engine's own
//            __tsan_* functions (access.cpp) for every load and store, and -fsanitize=array-bounds,alignment
//            its __ubsan_* functions. Compile with
//              -DSIM_CHECKED -fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0
//              -mllvm -tsan-instrument-atomics=0 -mllvm -tsan-instrument-read-before-write=1
//              -fsanitize=array-bounds,alignment -fsanitize-recover=array-bounds,alignment
//              -fno-vectorize -fno-slp-vectorize   (else two loads of the source count as one)
//            and link without any sanitizer flag, but with -O2: zig's linker else adds __ubsan_* functions of its own.
// Both: -g1 (lines of reports), header functions `nodebug` (a report then names the user's line), callers of the
// functions marked `convergent` inlined into the user's function: the return address is the call site by which
// lanes that wait for one another are recognised.
#ifndef METALSIM_ENGINE_H
#define METALSIM_ENGINE_H

#define SIM_CONVERGENT __attribute__((convergent))
#define SIM_INLINE static inline __attribute__((always_inline, nodebug))

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)   // whatever is compiled with -fvisibility=hidden

enum {
  SIM_LANES = 32,               // threads of a simdgroup
  SIM_BUFFERS = 31,             // [[buffer(0)]] … [[buffer(30)]], and as many [[threadgroup(n)]]
  SIM_QUEUE = 16,               // products a lane may queue before they must run
  SIM_GATHER_BYTES = 64,        // largest value of one lane in sim_gather
};

// ---- The table a kernel library exports ---------------------------------------------------------------------

enum { SIM_ARGUMENT_BUFFER = 0, SIM_ARGUMENT_THREADGROUP = 1 };

// One [[buffer(n)]] or [[threadgroup(n)]] parameter. Position attributes are no arguments: they are read from
// SimThread.
typedef struct SimArgument {
  const char *name;             // of the parameter, for reports
  int kind;                     // SIM_ARGUMENT_…
  int index;
  unsigned bytes;               // least size of what is bound: sizeof(T) of a reference or pointer to T, 0 if unknown
  int writable;                 // 1: `device T*`; 0: `constant`, or `device const`
  const bool *exists;           // the function constant of [[function_constant(f)]]; null: always there
} SimArgument;

typedef struct SimThread SimThread;

typedef struct SimKernel {
  const char *name;             // host name
  void (*run)(SimThread *);     // reads the arguments from the thread and calls the kernel; not `nodebug`, else a
                                // kernel that is inlined into it loses its lines
  const SimArgument *arguments;
  int argument_count;
  int max_threads;              // [[max_total_threads_per_threadgroup(n)]], or 0
} SimKernel;

// One [[function_constant(index)]]. The engine writes `value` and `defined` before each launch; a constant that the
// launch does not set is zeroed with `defined` false. `type` is MSL's name: "bool", "int", "uint", "float",
// "half", "ushort" …
typedef struct SimConstant {
  const char *name;
  const char *type;
  int index;
  unsigned bytes;
  void *value;
  bool *defined;                // what is_function_constant_defined(name) reads
} SimConstant;

typedef struct SimLibrary {
  const SimKernel *kernels;
  int kernel_count;
  const SimConstant *constants;
  int constant_count;
  void (*derive)(void);         // evaluates constants initialised from function constants, in order; null if none
  int checked;                  // 1 when compiled with SIM_CHECKED
} SimLibrary;

// In generated code:  extern "C" const SimLibrary sim_library = {…};
extern const SimLibrary sim_library;

// ---- What a running thread sees -----------------------------------------------------------------------------

typedef float SimPair __attribute__((ext_vector_type(2)));   // one lane's two elements of an 8x8 matrix

// Counters a kernel library adds to itself; the engine keeps the others (counters.h).
// Each is one per simdgroup and operation: lane 0 counts.
enum {
  SIM_MATRIX_LOADS,
  SIM_MATRIX_TRANSPOSED_LOADS,
  SIM_MATRIX_STORES,
  SIM_MATRIX_MULTIPLIES,        // half x half + float -> float
  SIM_MATRIX_MULTIPLIES_OTHER,  // every other mix of types
  SIM_MATRIX_COUNTERS,          // how many there are
};

// Products that wait to run, of one simdgroup.
typedef struct SimQueue {
  float a[SIM_QUEUE][64], b[SIM_QUEUE][64];         // row by row
  float *accumulators[SIM_QUEUE][SIM_LANES];        // each lane's two elements of the accumulator
} SimQueue;

// The same for every thread of a threadgroup. Three-element positions are x, y, z.
typedef struct SimThreadgroup {
  void *buffers[SIM_BUFFERS];                       // by [[buffer(n)]], offset added; an unbound one faults when used
  void *threadgroup_buffers[SIM_BUFFERS];           // by [[threadgroup(n)]]
  unsigned threadgroup_position_in_grid[3];
  unsigned threads_per_threadgroup[3];              // of this threadgroup: smaller at the edge of dispatchThreads
  unsigned dispatch_threads_per_threadgroup[3];     // of a full one
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned simdgroups_per_threadgroup;
  unsigned dispatch_simdgroups_per_threadgroup;
  unsigned quadgroups_per_threadgroup;
  // Reductions over lanes may take lane `i ^ sum_order` where they would take lane i: Apple's order is unknown, and a
  // test can ask for another one. 0 … 31, 0 by default. The engine does the same (modulo 8) to matrix products.
  unsigned sum_order;
} SimThreadgroup;

struct SimThread {
  const SimThreadgroup *threadgroup;
  unsigned thread_position_in_threadgroup[3];
  unsigned thread_position_in_grid[3];
  unsigned thread_index_in_threadgroup;
  unsigned thread_index_in_simdgroup;               // lane; thread_index_in_quadgroup is its lowest two bits
  unsigned simdgroup_index_in_threadgroup;
  // Of the matrix [row][column] that 32 lanes share, each lane holds (row, column) and (row, column + 1):
  // element = 8 * row + column, row = 4 * bit 4 + bits 2…1 of the lane, column = 4 * bit 3 + 2 * bit 0.
  unsigned element;
  unsigned pending;                                 // products this lane has queued
  SimQueue *queue;
  long *counters;                                   // [SIM_MATRIX_COUNTERS]
};

// The running thread. Constant while a kernel runs.
SimThread *sim_thread(void) __attribute__((const));

// The array of this threadgroup for one declaration of a threadgroup variable. `key` is an address that is unique
// to the declaration and its template instance (a static local). Filled with 0xFF bytes: a NaN of every float type.
// Call it at each execution of the declaration.
void *sim_threadgroup_array(const void *key, unsigned long bytes, unsigned long alignment, const char *name);

// ---- Barriers and collectives -------------------------------------------------------------------------------

// `flags` are MSL's mem_flags: 1 mem_device, 2 mem_threadgroup; others order nothing here.
enum { SIM_MEM_NONE = 0, SIM_MEM_DEVICE = 1, SIM_MEM_THREADGROUP = 2 };
void sim_threadgroup_barrier(unsigned flags) SIM_CONVERGENT;
void sim_simdgroup_barrier(unsigned flags) SIM_CONVERGENT;

// Every lane of the simdgroup that takes part gives `bytes` bytes (at most SIM_GATHER_BYTES) and gets all of them:
// the value of lane i lies at i * bytes of the result, and bit i of *active says whether lane i takes part (other
// values are 0xFF bytes). Valid until the thread's next sim_* call that is convergent. All simd_* and quad_*
// functions are built on it. Lanes that have returned, or were never launched, do not take part.
const void *sim_gather(const void *value, unsigned bytes, unsigned *active) SIM_CONVERGENT;

// ---- simdgroup_matrix ---------------------------------------------------------------------------------------

// Counts a matrix load or store (SIM_MATRIX_LOADS …), or a queued product. The accesses to a matrix's elements are
// plain loads and stores.
SIM_INLINE void sim_count_matrix(int counter) {
  SimThread *thread = sim_thread();
  if (thread->thread_index_in_simdgroup == 0) thread->counters[counter] += 1;
}

// d = a b + c, at once: waits for all 32 lanes. `destination` is the address of the matrix that receives d; it only
// serves to count the accumulators of a kernel. `counter` is SIM_MATRIX_MULTIPLIES or …_OTHER, by the types; the
// engine counts. The sum over k runs in float, from k = 0 to 7.
SimPair sim_multiply(SimPair a, SimPair b, SimPair c, const void *destination, int counter) SIM_CONVERGENT;

// Runs what the lane has queued; all lanes must have queued as much. Does nothing when nothing is queued. Barriers
// and sim_gather do it by themselves; call it (sim_settle) before anything reads, copies or overwrites a matrix of
// floats, or ends its life.
void sim_flush(void) SIM_CONVERGENT;

SIM_INLINE void sim_settle(void) {
  if (sim_thread()->pending) sim_flush();
}

// Whether a product that would write this lane's accumulator is still queued: an operand of another product that is
// pending itself must be settled first.
SIM_INLINE bool sim_is_pending(const SimThread *thread, const void *accumulator) {
  for (unsigned i = 0; i < thread->pending; i++)
    if (thread->queue->accumulators[i][thread->thread_index_in_simdgroup] == accumulator) return true;
  return false;
}

// *accumulator += a b, some time before the next flush ends (fast builds). The values of a and b are copied now, so
// operands of any type can be queued as floats, once they are settled. It counts.
SIM_INLINE void sim_queue_multiply(SimPair a, SimPair b, float *accumulator, int counter) {
  SimThread *thread = sim_thread();
  sim_count_matrix(counter);
  SimQueue *queue = thread->queue;
  const unsigned n = thread->pending;
  *(SimPair *)(queue->a[n] + thread->element) = a;
  *(SimPair *)(queue->b[n] + thread->element) = b;
  queue->accumulators[n][thread->thread_index_in_simdgroup] = accumulator;
  thread->pending = n + 1;
  if (n + 1 == SIM_QUEUE) sim_flush();
}

// Tells that a matrix object holds a loaded value, to count the matrices of a kernel (checked builds only: taking
// its address keeps the matrix in memory).
void sim_note_matrix(const void *matrix);

// ---- Checked builds -----------------------------------------------------------------------------------------

enum { SIM_READ = 0, SIM_WRITE = 1, SIM_READ_WRITE = 2 };
// An access that the instrumentation does not see.
void sim_access(const void *address, unsigned bytes, int kind);
// An atomic operation that is about to run: a load, a store, or both in one. Never a race with another atomic one.
void sim_atomic(const void *address, unsigned bytes, int kind);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
