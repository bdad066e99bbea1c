// Launches, and the rest of the host API.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>

#include "shim_block.h"
#include "shim_control.h"

namespace cuda_shim {
namespace {

constexpr size_t kMaxSharedBytes = 48 << 10;

struct State {
  std::mutex launching;  // there is one set of fibers
  int multiprocessors = 4;
  uint64_t launches = 0;
  cudaError_t last_error = cudaSuccess;
  Failure last_failure;
};

State state;

// On the heap and of the exact size, so that AddressSanitizer sees overruns.
struct SharedMemory {
  explicit SharedMemory(size_t size) : bytes(size), begin(std::malloc(size)) {}
  ~SharedMemory() { std::free(begin); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void poison() { std::memset(begin, 0xFF, bytes); }

  size_t bytes;
  void* begin;
};

void* shared_memory = nullptr;

Failure check(const cudaLaunchConfig_t& config) {
  const dim3& blocks = config.gridDim;
  const dim3& threads = config.blockDim;
  const auto invalid = [](cudaError_t code, const std::string& what) {
    return Failure{code, "launch refused: " + what};
  };
  if (threads.x == 0 || threads.y == 0 || threads.z == 0 || threads.x > kMaxThreads ||
      threads.y > kMaxThreads || threads.z > 64 ||
      uint64_t{threads.x} * threads.y * threads.z > kMaxThreads) {
    return invalid(cudaErrorInvalidConfiguration,
                   "a block has 1 to 1024 threads, at most 64 along z, not " +
                       std::to_string(threads.x) + " x " + std::to_string(threads.y) + " x " +
                       std::to_string(threads.z));
  }
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.x > 0x7FFFFFFF ||
      blocks.y > 65535 || blocks.z > 65535) {
    return invalid(cudaErrorInvalidConfiguration,
                   "a grid has 1 to 2^31 - 1 x 65535 x 65535 blocks, not " +
                       std::to_string(blocks.x) + " x " + std::to_string(blocks.y) + " x " +
                       std::to_string(blocks.z));
  }
  if (config.dynamicSmemBytes > kMaxSharedBytes) {
    return invalid(cudaErrorInvalidValue, "a block has at most 49152 bytes of shared memory, not " +
                                              std::to_string(config.dynamicSmemBytes));
  }
  if (config.numAttrs != 0) {
    return invalid(cudaErrorNotSupported, "the shim knows no launch attributes");
  }
  return {};
}

// Numbers of blocks in the order in which they run.
class BlockOrder {
 public:
  BlockOrder(uint64_t blocks, Turns& turns) : blocks_(blocks), order_(turns.order()) {
    if (order_ != Order::kRandom) return;
    shuffled_.resize(blocks);
    std::iota(shuffled_.begin(), shuffled_.end(), uint64_t{0});
    for (uint64_t i = blocks; i > 1; --i) std::swap(shuffled_[i - 1], shuffled_[turns.below(i)]);
  }

  uint64_t operator[](uint64_t i) const {
    if (order_ == Order::kRandom) return shuffled_[i];
    return order_ == Order::kForward ? i : blocks_ - 1 - i;
  }

 private:
  uint64_t blocks_;
  Order order_;
  std::vector<uint64_t> shuffled_;
};

Failure run_grid(const cudaLaunchConfig_t& config, void (*body)(const void*), const void* closure) {
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  const uint64_t blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  SharedMemory shared(config.dynamicSmemBytes);
  shared_memory = shared.begin;
  if (block.observer != nullptr) block.observer->launch_begins();
  const BlockOrder order(blocks, block.turns);
  for (uint64_t i = 0; i < blocks; ++i) {
    block.number = order[i];
    blockIdx.x = static_cast<unsigned>(block.number % gridDim.x);
    blockIdx.y = static_cast<unsigned>(block.number / gridDim.x % gridDim.y);
    blockIdx.z = static_cast<unsigned>(block.number / gridDim.x / gridDim.y);
    shared.poison();
    if (block.observer != nullptr) {
      block.observer->block_begins(threads, shared.begin, shared.bytes);
    }
    Failure failure = block.run(threads, body, closure);
    if (failure.code != cudaSuccess) return failure;
  }
  return {};
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, void (*body)(const void*),
                   const void* closure) {
  const std::lock_guard lock(state.launching);
  Failure failure = check(config);
  if (failure.code == cudaSuccess) {
    ++state.launches;
    failure = run_grid(config, body, closure);
    shared_memory = nullptr;
  }
  if (failure.code == cudaSuccess) return cudaSuccess;
  state.last_error = failure.code;
  state.last_failure = std::move(failure);
  return state.last_error;
}

}  // namespace cuda_shim

using cuda_shim::block;
using cuda_shim::state;

void* dynamic_shared_memory() { return cuda_shim::shared_memory; }

const char* cudaGetErrorString(cudaError_t error) {
  if (error == state.last_failure.code && error != cudaSuccess) {
    return state.last_failure.text.c_str();
  }
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorAssert:
      return "device-side assert triggered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() { return std::exchange(state.last_error, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return state.last_error; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return state.last_error = cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = cuda_shim::kMaxThreads;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(cuda_shim::kMaxSharedBytes);
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = cuda_shim::kLanes;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = state.multiprocessors;
      return cudaSuccess;
  }
  return state.last_error = cudaErrorInvalidValue;
}

cudaError_t cudaMemsetAsync(void* destination, int value, size_t bytes, cudaStream_t /*stream*/) {
  std::memset(destination, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes,
                            cudaMemcpyKind /*kind*/, cudaStream_t /*stream*/) {
  std::memcpy(destination, source, bytes);
  return cudaSuccess;
}

void shim_set_order(int order, uint64_t seed) {
  if (order < 0 || order > 2) {
    std::fprintf(stderr, "shim_set_order: there are the orders 0 to 2, not %d\n", order);
    std::abort();
  }
  block.turns.set(static_cast<cuda_shim::Order>(order), seed);
}

void shim_set_multiprocessors(int count) { state.multiprocessors = count; }

const char* shim_last_error() { return state.last_failure.text.c_str(); }

void shim_reset_statistics() {
  state.launches = 0;
  state.last_error = cudaSuccess;
  state.last_failure = {};
  if (block.observer != nullptr) block.observer->reset();
}

uint64_t shim_launches() { return state.launches; }
