#include "shim_context.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_shim {
namespace {

constexpr size_t kStackBytes = 256 << 10;
// What entry functions, which never return, may have left poisoned.
constexpr size_t kEntryBytes = 4096;

Context* left = nullptr;
Context* entered = nullptr;

Stack make_stack() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) throw std::bad_alloc();
  return {static_cast<char*>(memory) + page, kStackBytes};
}

void before_switch([[maybe_unused]] Context& from, [[maybe_unused]] Context& to,
                   [[maybe_unused]] bool ends) {
  left = &from;
  entered = &to;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(ends ? nullptr : &from.sanitizer_state, to.stack.bottom,
                                 to.stack.bytes);
#endif
}

}  // namespace

#if !CUDA_SHIM_USES_UCONTEXT

// The callee-saved registers of the System V ABI; the caller takes care of all others.
extern "C" void cuda_shim_switch(void** from, void* to);
asm(R"(
    .text
    .hidden cuda_shim_switch
    .globl cuda_shim_switch
    .type cuda_shim_switch, @function
cuda_shim_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
    .size cuda_shim_switch, . - cuda_shim_switch
)");

#endif

Stack stack_of(size_t thread) {
  static std::vector<Stack> stacks;
  while (stacks.size() <= thread) stacks.push_back(make_stack());
  // Stacks that all end at the same offset of a page would compete for the same cache lines.
  Stack stack = stacks[thread];
  stack.bytes -= thread % 32 * 128;
  return stack;
}

void prepare(Context& context, const Stack& stack, void (*entry)(),
             [[maybe_unused]] bool abandoned) {
  context.stack = stack;
  context.sanitizer_state = nullptr;
#ifdef __SANITIZE_ADDRESS__
  const size_t stale = abandoned ? stack.bytes : kEntryBytes;
  __asan_unpoison_memory_region(stack.bottom + stack.bytes - stale, stale);
#endif
#if CUDA_SHIM_USES_UCONTEXT
  getcontext(&context.machine);
  context.machine.uc_stack.ss_sp = stack.bottom;
  context.machine.uc_stack.ss_size = stack.bytes;
  context.machine.uc_link = nullptr;
  makecontext(&context.machine, entry, 0);
#else
  // From the top: a return address of 0 ends backtraces, then what cuda_shim_switch pops.
  constexpr int kRegisters = 6;
  void** top = reinterpret_cast<void**>(stack.bottom + stack.bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kRegisters; ++i) *--top = nullptr;
  context.stack_pointer = top;
#endif
}

void arrived_in_context() {
#ifdef __SANITIZE_ADDRESS__
  // Also how the stack of the operating system's thread becomes known.
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(entered->sanitizer_state, &bottom, &bytes);
  if (left->stack.bottom == nullptr) {
    left->stack = {static_cast<char*>(const_cast<void*>(bottom)), bytes};
  }
#endif
}

void switch_context(Context& from, Context& to) {
  before_switch(from, to, false);
#if CUDA_SHIM_USES_UCONTEXT
  swapcontext(&from.machine, &to.machine);
#else
  cuda_shim_switch(&from.stack_pointer, to.stack_pointer);
#endif
  arrived_in_context();
}

void leave_context(Context& from, Context& to) {
  before_switch(from, to, true);
#if CUDA_SHIM_USES_UCONTEXT
  setcontext(&to.machine);
#else
  cuda_shim_switch(&from.stack_pointer, to.stack_pointer);
#endif
  abort();
}

}  // namespace cuda_shim
