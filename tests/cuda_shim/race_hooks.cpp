// What gcc calls in code compiled with -fsanitize=thread, in place of libtsan.
#include <cstring>

#include "race_detector.h"

namespace {

constexpr cuda_shim::Operation kRead{true, false, false};
constexpr cuda_shim::Operation kWrite{false, true, false};
constexpr cuda_shim::Operation kAtomicRead{true, false, true};
constexpr cuda_shim::Operation kAtomicWrite{false, true, true};
constexpr cuda_shim::Operation kAtomicUpdate{true, true, true};

void note(const volatile void* address, size_t bytes, const cuda_shim::Operation& operation,
          void* instruction) {
  cuda_shim::race_detector.access(const_cast<const void*>(address), bytes, operation, instruction);
}

}  // namespace

#define HERE __builtin_return_address(0)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void** address) { note(address, sizeof(void*), kRead, HERE); }
void __tsan_read_range(void* address, size_t bytes) { note(address, bytes, kRead, HERE); }
void __tsan_write_range(void* address, size_t bytes) { note(address, bytes, kWrite, HERE); }

#define DEFINE_ACCESSES(bytes)                                                             \
  void __tsan_read##bytes(void* address) { note(address, bytes, kRead, HERE); }            \
  void __tsan_write##bytes(void* address) { note(address, bytes, kWrite, HERE); }          \
  void __tsan_volatile_read##bytes(void* address) { note(address, bytes, kRead, HERE); }   \
  void __tsan_volatile_write##bytes(void* address) { note(address, bytes, kWrite, HERE); } \
  void __tsan_unaligned_read##bytes(void* address) { note(address, bytes, kRead, HERE); }  \
  void __tsan_unaligned_write##bytes(void* address) { note(address, bytes, kWrite, HERE); }

DEFINE_ACCESSES(1)
DEFINE_ACCESSES(2)
DEFINE_ACCESSES(4)
DEFINE_ACCESSES(8)
DEFINE_ACCESSES(16)

#define DEFINE_UPDATE(type, bits, name)                                                    \
  type __tsan_atomic##bits##_##name(volatile void* address, type value, int /*order*/) {   \
    note(address, sizeof(type), kAtomicUpdate, HERE);                                      \
    return __atomic_##name(static_cast<volatile type*>(address), value, __ATOMIC_SEQ_CST); \
  }

#define DEFINE_EXCHANGE(type, bits)                                                                \
  type __tsan_atomic##bits##_exchange(volatile void* address, type value, int /*order*/) {         \
    note(address, sizeof(type), kAtomicUpdate, HERE);                                              \
    return __atomic_exchange_n(static_cast<volatile type*>(address), value, __ATOMIC_SEQ_CST);     \
  }                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile void* address, void* expected,       \
                                                     type value, int /*order*/, int /*failed*/) {  \
    note(address, sizeof(type), kAtomicUpdate, HERE);                                              \
    return __atomic_compare_exchange_n(static_cast<volatile type*>(address),                       \
                                       static_cast<type*>(expected), value, false,                 \
                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                        \
  }                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile void* address, void* expected,         \
                                                   type value, int order, int failed) {            \
    return __tsan_atomic##bits##_compare_exchange_strong(address, expected, value, order, failed); \
  }

#define DEFINE_ATOMICS(type, bits)                                                        \
  type __tsan_atomic##bits##_load(const volatile void* address, int /*order*/) {          \
    note(address, sizeof(type), kAtomicRead, HERE);                                       \
    return __atomic_load_n(static_cast<const volatile type*>(address), __ATOMIC_SEQ_CST); \
  }                                                                                       \
  void __tsan_atomic##bits##_store(volatile void* address, type value, int /*order*/) {   \
    note(address, sizeof(type), kAtomicWrite, HERE);                                      \
    __atomic_store_n(static_cast<volatile type*>(address), value, __ATOMIC_SEQ_CST);      \
  }                                                                                       \
  DEFINE_EXCHANGE(type, bits)                                                             \
  DEFINE_UPDATE(type, bits, fetch_add)                                                    \
  DEFINE_UPDATE(type, bits, fetch_sub)                                                    \
  DEFINE_UPDATE(type, bits, fetch_and)                                                    \
  DEFINE_UPDATE(type, bits, fetch_or)                                                     \
  DEFINE_UPDATE(type, bits, fetch_xor)

DEFINE_ATOMICS(uint8_t, 8)
DEFINE_ATOMICS(uint16_t, 16)
DEFINE_ATOMICS(uint32_t, 32)
DEFINE_ATOMICS(uint64_t, 64)

void __tsan_atomic_thread_fence(int /*order*/) {}
void __tsan_atomic_signal_fence(int /*order*/) {}

// Calls that the compiler does not expand are not instrumented, but renamed to these (build.py).
void* cuda_shim_memcpy(void* destination, const void* source, size_t bytes) {
  note(source, bytes, kRead, HERE);
  note(destination, bytes, kWrite, HERE);
  return std::memcpy(destination, source, bytes);
}

void* cuda_shim_memmove(void* destination, const void* source, size_t bytes) {
  note(source, bytes, kRead, HERE);
  note(destination, bytes, kWrite, HERE);
  return std::memmove(destination, source, bytes);
}

void* cuda_shim_memset(void* destination, int value, size_t bytes) {
  note(destination, bytes, kWrite, HERE);
  return std::memset(destination, value, bytes);
}

}  // extern "C"
