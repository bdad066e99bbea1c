#include "race_counter.h"

#include <algorithm>
#include <bit>

namespace cuda_shim {

int ByteCounter::watch(uintptr_t begin, uint64_t bytes, bool once_per_warp) {
  regions_.push_back({begin, begin + bytes, once_per_warp});
  return static_cast<int>(regions_.size()) - 1;
}

void ByteCounter::begin_launch() {
  for (Region& region : regions_) region.seen.clear();
}

void ByteCounter::reset() {
  for (Region& region : regions_) {
    region.read = region.written = 0;
    region.seen.clear();
  }
}

uint64_t ByteCounter::unseen(Region& region, uintptr_t begin, uintptr_t end, uint64_t warp) {
  auto& seen = region.seen[warp];
  uint64_t bytes = 0;
  for (uint64_t at = begin - region.begin, last = end - region.begin; at < last;) {
    const uint64_t stop = std::min(last, (at / 64 + 1) * 64);
    const uint64_t mask = (stop - at == 64 ? ~uint64_t{0} : (uint64_t{1} << (stop - at)) - 1)
                          << at % 64;
    uint64_t& known = seen[at / 64];
    bytes += std::popcount(mask & ~known);
    known |= mask;
    at = stop;
  }
  return bytes;
}

void ByteCounter::count(uintptr_t begin, uintptr_t end, bool reads, bool writes, uint64_t warp) {
  for (Region& region : regions_) {
    const uintptr_t first = std::max(begin, region.begin);
    const uintptr_t last = std::min(end, region.end);
    if (first >= last) continue;
    if (writes) region.written += last - first;
    if (reads) {
      region.read += region.once_per_warp ? unseen(region, first, last, warp) : last - first;
    }
  }
}

std::string ByteCounter::place(uintptr_t address) const {
  for (size_t i = 0; i < regions_.size(); ++i) {
    const Region& region = regions_[i];
    if (address < region.begin || address >= region.end) continue;
    return "byte " + std::to_string(address - region.begin) + " of region " + std::to_string(i);
  }
  return {};
}

}  // namespace cuda_shim
