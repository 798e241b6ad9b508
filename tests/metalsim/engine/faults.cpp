// Faults of kernels (an access to unmapped memory, a division by zero, a full stack) become reports.

#include <errno.h>
#include <string.h>
#include <sys/ucontext.h>

#include "memory.h"
#include "worker.h"

namespace sim {

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, TIME_IS_UP};
static struct sigaction before[sizeof SIGNALS / sizeof *SIGNALS];

static uintptr_t instruction(const void *context) {
  const ucontext_t *user = (const ucontext_t *)context;
#if defined(__APPLE__) && defined(__aarch64__)
  return (uintptr_t)user->uc_mcontext->__ss.__pc;
#elif defined(__APPLE__)
  return (uintptr_t)user->uc_mcontext->__ss.__rip;
#elif defined(__aarch64__)
  return (uintptr_t)user->uc_mcontext.pc;
#else
  return (uintptr_t)user->uc_mcontext.gregs[REG_RIP];
#endif
}

static void describe_access(const Worker &w, uintptr_t address, const void *code) {
  const uintptr_t own = address - (uintptr_t)w.stacks;
  if (own < MAX_THREADS * worker_memory.stack_stride && own % worker_memory.stack_stride < worker_memory.page) {
    report(FAULT, code, "the thread's own memory is full: %d KiB of stack, or endless recursion",
           (int)(worker_memory.stack_stride / 1024));
    return;
  }
  if (const int index = device_memory.unbound_index(address); index >= 0) {
    report(FAULT, code, "access through argument %d, to which nothing is bound", index);
    return;
  }
  if (const Allocation *buffer = device_memory.find(address)) {
    const char *what = address >= buffer->mapped && address < buffer->mapped_end ? "write to" : "access at";
    report(FAULT, code, "%s byte %ld of buffer '%s' of %llu bytes%s", what,
           (long)(address - buffer->begin), buffer->name, (unsigned long long)(buffer->end - buffer->begin),
           buffer->readonly && *what == 'w' ? ", which is read-only" : "");
    return;
  }
  report(FAULT, code, "access at address %#llx, in no buffer", (unsigned long long)address);
}

static void on_signal(int number, siginfo_t *info, void *context) {
  const int saved = errno;
  Worker *w = worker;
  if (!w || !w->armed || !w->current) {
    if (number == TIME_IS_UP) return;
    for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++)   // not a kernel's: it comes again
      if (SIGNALS[i] == number) sigaction(number, &before[i], nullptr);
    errno = saved;
    return;
  }
  const uintptr_t at = instruction(context);
  if (number == TIME_IS_UP && w->reporting) return;   // it holds a lock; the signal comes again
  w->abandoned = true;
  const void *code = (const void *)(at + 1);          // reports name the instruction before
  if (number == TIME_IS_UP)
    report(DEADLOCK, code, "the launch still ran after %u s", w->launch->time_limit);
  else if (number == SIGFPE)
    report(FAULT, code, "integer division by zero, or overflow of one");
  else if (number == SIGILL || number == SIGTRAP)
    report(FAULT, code, "the compiler holds this point to be unreachable");
  else
    describe_access(*w, (uintptr_t)info->si_addr, code);
  siglongjmp(w->escape, 1);
}

void catch_faults() {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) sigaction(SIGNALS[i], &action, &before[i]);
}

void stop_catching_faults() {
  for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) sigaction(SIGNALS[i], &before[i], nullptr);
}

}  // namespace sim
