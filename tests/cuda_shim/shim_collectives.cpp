#include "shim_collectives.h"

#include <string>
#include <string_view>

#include "shim_block.h"

namespace cuda_shim {
namespace {

// PTX, shfl.sync: the segment of `width` lanes limits each mode in its own way.
uint32_t source_lane(const Shuffle& shuffle, unsigned lane) {
  const int self = static_cast<int>(lane);
  const int begin = self & ~(shuffle.width - 1);
  const int last = begin | (shuffle.width - 1);
  const int operand = shuffle.operand;
  switch (shuffle.kind) {
    case Collective::kShuffleUp:
      return operand > self - begin ? lane : lane - operand;
    case Collective::kShuffleDown:
      return operand > last - self ? lane : lane + operand;
    case Collective::kShuffleXor: {
      const int source = self ^ (operand & 31);
      return source > last ? lane : static_cast<uint32_t>(source);
    }
    default:
      return static_cast<uint32_t>(begin | (operand & (shuffle.width - 1)));
  }
}

}  // namespace

uint64_t exchange(const Shuffle& shuffle, uint64_t value, unsigned bytes, const Where& where) {
  const Thread& thread = *block.running();
  const Wait wait{shuffle.kind, static_cast<uint8_t>(bytes), shuffle.mask, kLanes, value, where};
  const int width = shuffle.width;
  if (width < 1 || width > static_cast<int>(kLanes) || (width & (width - 1)) != 0) {
    const Report report(block);
    block.fail(cudaErrorLaunchFailure, report.at(thread, where) + " calls " + report.wait(wait) +
                                           ": the width is " + std::to_string(width) +
                                           ", not a power of two up to 32");
  }
  Wait selected = wait;
  selected.source = source_lane(shuffle, thread.lane());
  return block.exchange(selected);
}

unsigned vote(Collective kind, unsigned mask, bool predicate, const Where& where) {
  return static_cast<unsigned>(block.exchange({kind, 0, mask, kLanes, predicate, where}));
}

void synchronize_warp(unsigned mask, const Where& where) {
  block.exchange({Collective::kSyncWarp, 0, mask, kLanes, 0, where});
}

void synchronize_block(const Where& where) { block.synchronize(where); }

void trap(const Where& where) {
  const std::string_view path = where.file_name();
  block.fail(cudaErrorAssert, Report(block).at(*block.running(), where) + " calls __trap, at " +
                                  std::string(path.substr(path.rfind('/') + 1)) + ":" +
                                  std::to_string(where.line()));
}

}  // namespace cuda_shim
