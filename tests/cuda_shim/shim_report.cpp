#include <cstdio>
#include <map>
#include <string_view>
#include <utility>

#include "shim_block.h"

namespace cuda_shim {
namespace {

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kShuffle:
      return "__shfl_sync";
    case Collective::kShuffleUp:
      return "__shfl_up_sync";
    case Collective::kShuffleDown:
      return "__shfl_down_sync";
    case Collective::kShuffleXor:
      return "__shfl_xor_sync";
    case Collective::kBallot:
      return "__ballot_sync";
    case Collective::kAny:
      return "__any_sync";
    case Collective::kAll:
      return "__all_sync";
    case Collective::kSyncWarp:
      return "__syncwarp";
    case Collective::kSyncThreads:
      return "__syncthreads";
  }
  return "?";
}

std::string hexadecimal(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", value);
  return text;
}

std::string line_of(const Where& where) {
  const std::string_view path = where.file_name();
  return std::string(path.substr(path.rfind('/') + 1)) + ":" + std::to_string(where.line());
}

std::string triple(const uint3& value) {
  return "(" + std::to_string(value.x) + ", " + std::to_string(value.y) + ", " +
         std::to_string(value.z) + ")";
}

// Sorted numbers as ranges: "0-6, 8".
std::string ranges(const std::vector<unsigned>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(numbers[i]);
    if (end - i > 1) text += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace

std::string Report::at(const Thread& thread, const Where& where) const {
  return std::string(where.function_name()) + ": block " + triple(blockIdx) + ", thread " +
         triple(thread.index) + " (lane " + std::to_string(thread.lane()) + " of warp " +
         std::to_string(thread.warp()) + ")";
}

std::string Report::wait(const Wait& wait) const {
  std::string text = name_of(wait.kind);
  if (wait.kind != Collective::kSyncThreads) text += " with mask " + hexadecimal(wait.mask);
  if (wait.bytes != 0) text += ", " + std::to_string(wait.bytes) + " bytes";
  return text + ", at " + line_of(wait.where);
}

std::string Report::group_members(const Thread& thread, const Group& group) const {
  std::vector<unsigned> lanes;
  for (uint32_t left = group.arrived; left != 0; left &= left - 1) {
    lanes.push_back(static_cast<unsigned>(std::countr_zero(left)));
  }
  const Thread& first = block_.threads_[thread.number - thread.lane() + lanes.front()];
  return "lanes " + ranges(lanes) + " wait in " + wait(first.wait);
}

std::string Report::diverged(const Thread& thread, const Group& group) const {
  return at(thread, thread.wait.where) + " calls " + wait(thread.wait) + ", but " +
         group_members(thread, group) + ": lanes of one mask must call the same collective";
}

std::string Report::other_barrier(const Thread& thread, const Thread& first) const {
  return at(thread, thread.wait.where) + " calls " + wait(thread.wait) + ", but thread " +
         triple(first.index) + " waits in " + wait(first.wait) +
         ": all threads of a block must call the same one";
}

std::string Report::state(const Thread& thread) const {
  const Warp& warp = block_.warps_[thread.warp()];
  if ((warp.live & thread.bit()) == 0) return "have exited";
  std::string text = "wait in " + wait(thread.wait);
  const uint32_t missing = thread.wait.mask & ~warp.exists;
  if (missing != 0) text += " (the block has no lanes " + hexadecimal(missing) + ")";
  return text;
}

std::string Report::deadlock() const {
  std::vector<std::pair<std::string, std::vector<unsigned>>> states;
  std::map<std::string, size_t> place;
  const Thread* waiting = nullptr;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned i = 0; i < threads; ++i) {
    const Thread& thread = block_.threads_[i];
    const std::string text = state(thread);
    const auto [entry, is_new] = place.emplace(text, states.size());
    if (is_new) states.emplace_back(text, std::vector<unsigned>());
    states[entry->second].second.push_back(i);
    if (waiting == nullptr && text != "have exited") waiting = &thread;
  }
  std::string text = std::string(waiting->wait.where.function_name()) + ": deadlock in block " +
                     triple(blockIdx) + " of " + std::to_string(threads) + " threads:";
  for (const auto& [description, members] : states) {
    text += "\n  threads " + ranges(members) + " " + description;
  }
  return text;
}

}  // namespace cuda_shim
