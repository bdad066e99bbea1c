// Stacks, and switches between them.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(CUDA_SHIM_UCONTEXT)
#define CUDA_SHIM_USES_UCONTEXT 1
#include <ucontext.h>
#else
#define CUDA_SHIM_USES_UCONTEXT 0
#endif

namespace cuda_shim {

struct Stack {
  char* bottom = nullptr;
  size_t bytes = 0;

  bool contains(const void* address) const {
    const char* byte = static_cast<const char*>(address);
    return byte >= bottom && byte < bottom + bytes;
  }
};

// The stack of the thread with this number in its block. Stacks are made once and kept.
Stack stack_of(size_t thread);

// A place to switch to: where a fiber, or the thread that launches, goes on.
struct Context {
#if CUDA_SHIM_USES_UCONTEXT
  ucontext_t machine;
#else
  void* stack_pointer = nullptr;
#endif
  Stack stack;
  void* sanitizer_state = nullptr;
};

// The first switch to `context` calls `entry`, which must not return, on the stack. `abandoned`:
// the stack holds frames that were never left.
void prepare(Context& context, const Stack& stack, void (*entry)(), bool abandoned);
void switch_context(Context& from, Context& to);
// As switch_context, for a fiber that nothing will switch to again.
[[noreturn]] void leave_context(Context& from, Context& to);
// What `entry` calls first.
void arrived_in_context();

}  // namespace cuda_shim
