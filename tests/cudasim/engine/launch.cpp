// A launch: blocks one after another, clusters together. Faults of kernels become reports.

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sys/ucontext.h>

#include "state.h"

namespace cudasim {

static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGALRM};
static struct sigaction before[sizeof kSignals / sizeof *kSignals];
alignas(16) static char signal_stack[64 << 10];

static u64 instruction_of(const void *context) {
  const ucontext_t *user = (const ucontext_t *)context;
#if defined(__x86_64__)
  return u64(user->uc_mcontext.gregs[REG_RIP]);
#else
  return u64(user->uc_mcontext.pc);
#endif
}

static void on_signal(int number, siginfo_t *info, void *context) {
  if (!cluster.armed) {
    for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; i++)  // no kernel's: it comes again
      if (kSignals[i] == number) sigaction(number, &before[i], nullptr);
    return;
  }
  char text[160] = "division by zero, or code that the compiler holds to be unreachable";
  const u64 address = (u64)info->si_addr, at = instruction_of(context) + 1;  // reports name the instruction before
  if (number == SIGALRM) return fail_from_signal("time", at, "the launch takes too long: a loop without an end?");
  if (number == SIGSEGV || number == SIGBUS) {
    if (!describe_access(address, text, sizeof text))
      snprintf(text, sizeof text, "access at address %#llx, in no buffer", address);
    return fail_from_signal(cluster.gate_closed ? "no wait" : "out of bounds", at, text);
  }
  fail_from_signal("fault", at, text);
}

static void catch_faults(u32 seconds) {
  const stack_t stack = {signal_stack, 0, sizeof signal_stack};
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; i++) sigaction(kSignals[i], &action, &before[i]);
  const itimerval limit = {{0, 0}, {long(seconds), 0}};
  setitimer(ITIMER_REAL, &limit, nullptr);
  cluster.armed = true;
}

static void stop_catching_faults() {
  cluster.armed = false;
  const itimerval none = {};
  setitimer(ITIMER_REAL, &none, nullptr);
  for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; i++) sigaction(kSignals[i], &before[i], nullptr);
}

static void run_grid(const Launch &launch) {
  const u64 across = launch.grid.x / launch.cluster, count = across * launch.grid.y * launch.grid.z;
  for (u64 i = 0; i < count; i++) {
    const u64 at = launch.order == 1 ? count - 1 - i : i;
    cluster.first = i == 0;
    const u64 row = at / across;
    run_cluster({u32(at % across) * launch.cluster, u32(row % launch.grid.y), u32(row / launch.grid.y)});
  }
  check_fillings();
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

bool cudasim_launch(Launch *launch) {
  cluster.launch = launch;
  cluster.failed = cluster.gate_closed = false;
  cluster.random = launch->order | 1;
  launch->report = {};
  catch_faults(launch->seconds);
  if (!sigsetjmp(cluster.escape, 1)) run_grid(*launch);
  else cluster.failed = true;
  stop_catching_faults();
  if (cluster.gate_closed) open_gate();
  return !cluster.failed;
}

u64 cudasim_layout(int which) { return which == 0 ? sizeof(Report) : sizeof(Launch); }

u64 cudasim_image_base(const void *code) {
  Dl_info info;
  return dladdr(code, &info) ? (u64)info.dli_fbase : 0;
}

void cudasim_misaligned(const void *pointer, const void *code) {
  fail("misaligned", {(u64)code}, "an access at address %p, which is no multiple of what is accessed", pointer);
}

void cudasim_outside_array(const void *index, const void *code) {
  fail("array index", {(u64)code}, "index %ld lies outside its array", (long)index);
}

}  // extern "C"
