// Switching between stacks, in assembly.

#include "fiber.h"

#include <stdint.h>
#include <string.h>

namespace sim {

// Callee-saved registers are kept on the stack that is left.
__attribute__((naked, noinline)) void switch_stack(void **, void *) {
#if defined(__x86_64__)
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n"
      "movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "ret");
#elif defined(__aarch64__)
  asm("sub sp, sp, #160\n"
      "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
      "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n"
      "mov sp, x1\n"
      "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
      "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n"
      "ret");
#else
#error "the simulator's fibers know x86-64 and arm64"
#endif
}

void *fresh_stack(char *top, void (*entry)()) {
  void **stack = (void **)((uintptr_t)top & ~(uintptr_t)63);
#if defined(__x86_64__)
  *--stack = nullptr;                  // the return address of `entry`, which does not return
  *--stack = (void *)entry;
  stack -= 6;
  memset(stack, 0, 6 * sizeof(void *));
#else
  stack -= 20;
  memset(stack, 0, 20 * sizeof(void *));
  stack[11] = (void *)entry;      // x30
#endif
  return stack;
}

}  // namespace sim
