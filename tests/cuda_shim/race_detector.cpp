#include "race_detector.h"

#include <dlfcn.h>

#include <cstdio>

#include "shim_control.h"

namespace cuda_shim {
namespace {

constexpr size_t kMaxExamples = 16;

// The line of an instruction, from the debug information, through binutils.
std::string line_of(void* instruction) {
  Dl_info info;
  if (dladdr(instruction, &info) == 0) return "?";
  // The instruction is a return address: the call is before it.
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(instruction) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
  char command[4096];
  std::snprintf(command, sizeof(command), "addr2line -s -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
                static_cast<size_t>(offset));
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char line[512];
    if (std::fgets(line, sizeof(line), pipe) != nullptr) text = line;
    pclose(pipe);
  }
  text = text.substr(0, text.find_first_of(" \n"));
  return text.empty() ? "?" : text;
}

std::string describe(const Access& access) {
  const Moment& moment = access.moment;
  return std::string(access.atomic ? "atomic " : "") + (access.writes ? "write" : "read") +
         " by block " + std::to_string(moment.block) + ", thread " + std::to_string(moment.thread) +
         ", after " + std::to_string(moment.barrier) + " barriers, at " +
         line_of(access.instruction);
}

}  // namespace

RaceDetector race_detector;

RaceDetector::RaceDetector() { Block::observer = this; }

void RaceDetector::launch_begins() {
  shadow_.begin_launch();
  counter.begin_launch();
}

void RaceDetector::block_begins(unsigned threads, const void* shared_memory, size_t bytes) {
  order_.begin_block(threads);
  warps_ = (threads + kLanes - 1) / kLanes;
  shared_begin_ = reinterpret_cast<uintptr_t>(shared_memory);
  shared_end_ = shared_begin_ + bytes;
  // Every block has shared memory of its own, even where it lies at the same addresses.
  shadow_.forget(shared_begin_, shared_end_);
}

void RaceDetector::reset() {
  races_ = 0;
  known_.clear();
  examples_.clear();
  counter.reset();
}

void RaceDetector::access(const void* address, size_t bytes, const Operation& operation,
                          void* instruction) {
  const Thread* const thread = block.running();
  if (thread == nullptr || bytes == 0 || thread->context.stack.contains(address)) return;
  // The linker may give the detector a kernel's copy of an inline function, which calls this.
  if (is_busy_) return;
  is_busy_ = true;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + bytes;
  counter.count(begin, end, operation.reads, operation.writes,
                block.number * warps_ + thread->warp());
  Access access{order_.now(block.number, thread->number), instruction, 0, operation.writes,
                operation.atomic};
  races_ += is_race(begin, end, access);
  is_busy_ = false;
}

bool RaceDetector::is_race(uintptr_t begin, uintptr_t end, Access access) {
  constexpr uintptr_t kGranule = Shadow::kGranule;
  bool found = false;
  for (uintptr_t granule = begin / kGranule; granule * kGranule < end; ++granule) {
    const uintptr_t low = granule * kGranule;
    access.bytes = 0xF;
    if (low < begin) access.bytes &= static_cast<uint8_t>(0xF << (begin - low));
    if (low + kGranule > end) access.bytes &= static_cast<uint8_t>(0xF >> (low + kGranule - end));
    const Access* const first = shadow_.note(granule, access, order_);
    if (first == nullptr) continue;
    found = true;
    remember(low < begin ? begin : low, *first, access);
  }
  return found;
}

void RaceDetector::remember(uintptr_t address, const Access& first, const Access& second) {
  if (known_.size() >= kMaxExamples) return;
  if (!known_.emplace(first.instruction, second.instruction).second) return;
  examples_.push_back({place(address), {address, first, second}});
}

std::string RaceDetector::place(uintptr_t address) const {
  if (address >= shared_begin_ && address < shared_end_) {
    return "byte " + std::to_string(address - shared_begin_) + " of shared memory";
  }
  const std::string watched = counter.place(address);
  if (!watched.empty()) return watched;
  char text[32];
  std::snprintf(text, sizeof(text), "address 0x%zx", static_cast<size_t>(address));
  return text;
}

const char* RaceDetector::report() {
  report_.clear();
  for (const auto& [where, race] : examples_) {
    report_ +=
        "race at " + where + ":\n  " + describe(race.first) + "\n  " + describe(race.second) + "\n";
  }
  if (races_ > examples_.size()) {
    report_ += std::to_string(races_) + " accesses race in all; each pair of lines is here once\n";
  }
  return report_.c_str();
}

}  // namespace cuda_shim

using cuda_shim::race_detector;

uint64_t shim_race_count() { return race_detector.races(); }
const char* shim_race_report() { return race_detector.report(); }
int shim_watch(const void* begin, uint64_t bytes, int once_per_warp) {
  return race_detector.counter.watch(reinterpret_cast<uintptr_t>(begin), bytes, once_per_warp != 0);
}
uint64_t shim_bytes_read(int id) { return race_detector.counter.read(id); }
uint64_t shim_bytes_written(int id) { return race_detector.counter.written(id); }
void shim_unwatch_all() { race_detector.counter.unwatch_all(); }
