// Switching between stacks. The CUDA simulator uses it as well.
#pragma once

namespace sim {

// Leaves this stack, with its pointer in *save, and goes on where the stack with the pointer `resume` was left.
void switch_stack(void **save, void *resume);
// A stack that goes on at the beginning of `entry`, which must not return.
void *fresh_stack(char *top, void (*entry)());

}  // namespace sim
