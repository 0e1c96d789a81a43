#include "plan/channels.h"

#include <algorithm>

namespace jaxcomm {
namespace {

// Fewer bytes do not justify another channel, because every channel sends all signals.
constexpr int64_t kMinChannelBytes = 16 << 10;

}  // namespace

int32_t NumChannels(int64_t block_bytes, int32_t max_channels) {
  return static_cast<int32_t>(std::clamp<int64_t>(block_bytes / kMinChannelBytes, 1, std::max(max_channels, 1)));
}

int32_t NumSliceChannels(int64_t block_bytes, int32_t max_channels) {
  const int32_t most = NumChannels(block_bytes, max_channels);
  return most > 2 && most % 2 == 0 ? most - 1 : most;
}

Range ChannelRange(int64_t block_count, int64_t item_bytes, int32_t num_channels, int32_t channel) {
  const int64_t grain = std::max<int64_t>(kGrainBytes / std::max<int64_t>(item_bytes, 1), 1);
  const Range grains = Subrange({0, CeilDiv(block_count, grain)}, num_channels, channel);
  const int64_t begin = std::min(grains.begin * grain, block_count);
  return {begin, std::min((grains.begin + grains.count) * grain, block_count) - begin};
}

int64_t ChannelCount(int64_t block_count, int64_t item_bytes, int32_t num_channels) {
  int64_t largest = 0;
  for (int32_t c = 0; c < num_channels; ++c) {
    largest = std::max(largest, ChannelRange(block_count, item_bytes, num_channels, c).count);
  }
  return largest;
}

bool FitsLl(int64_t message_bytes, int32_t max_channels) {
  return message_bytes > 0 && message_bytes <= int64_t{std::min(max_channels, kLlChannels)} * kLlBytes;
}

int32_t NumLlChannels(int64_t message_bytes, int32_t max_channels) {
  const int64_t enough = CeilDiv(message_bytes, kLlBytes / 2);
  return static_cast<int32_t>(std::clamp<int64_t>(enough, 1, std::min(max_channels, kLlChannels)));
}

RowPieces PiecesOf(int64_t row_bytes, int64_t bytes_per_pair, int32_t max_channels) {
  const int64_t most = NumChannels(bytes_per_pair, max_channels);
  const int64_t lines = CeilDiv(row_bytes, kGrainBytes);
  const int64_t lines_per_channel = std::max<int64_t>(CeilDiv(lines, most), 1);
  return {lines_per_channel * kGrainBytes, static_cast<int32_t>(CeilDiv(lines, lines_per_channel))};
}

// Not measured with jaxcomm. docs/internals/cost-model.md, "GPUs", gives the sources of these numbers.
Machine GpuMachine() {
  Machine machine;
  machine.launch_s = 2.2e-6;
  machine.sync_overhead_s = 5e-6;
  machine.arena = true;
  // Half of the bytes are flags.
  machine.ll = machine.ll_two_shot = LinkModel{0.03e-6, 175e9, 1.5e-6};
  machine.links[static_cast<size_t>(Link::kSelf)] = {0.3e-6, 1.5e12, 0};
  machine.links[static_cast<size_t>(Link::kNode)] = {0.5e-6, 350e9, 1e-6};
  machine.links[static_cast<size_t>(Link::kNetwork)] = {1e-6, 48e9, 7e-6};
  return machine;
}

Machine ChannelMachine(Machine gpu, int32_t num_channels) {
  gpu.concurrent_bytes = kConcurrentBytes;
  for (LinkModel& link : gpu.links) link.bytes_per_s /= num_channels;
  for (std::optional<LinkModel>* flags : {&gpu.ll, &gpu.ll_two_shot}) {
    if (*flags) (*flags)->bytes_per_s /= num_channels;
  }
  return gpu;
}

}  // namespace jaxcomm
