// The algorithm of a call on GPUs and its number of channels. All ranks come to the same result without communication.
// Needs no CUDA, so that jaxcomm.explain works without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "partition.h"
#include "select.h"

namespace jaxcomm {

// Channels begin at multiples of this, so that all of them can move 16 bytes at a time.
constexpr int64_t kGrainBytes = 128;

// Units that a rank may send to another in one call with flags, per channel, and how many channels may be used. Slots
// are twice as large and there are two sets: 256 KiB per peer in all. Not measured.
constexpr int32_t kLlUnitBytes = 8;
constexpr int32_t kLlUnits = 1024;
constexpr int32_t kLlBytes = kLlUnits * kLlUnitBytes;
constexpr int32_t kLlChannels = 8;

// As many channels as there is work for, of at most `max_channels`.
int32_t NumChannels(int64_t block_bytes, int32_t max_channels);
// Elements [begin, begin + count) of every block, for one channel.
Range ChannelRange(int64_t block_count, int64_t item_bytes, int32_t num_channels, int32_t channel);
// Elements of a block that the largest channel gets.
int64_t ChannelCount(int64_t block_count, int64_t item_bytes, int32_t num_channels);

// Whether messages are small enough for LL.
bool FitsLl(int64_t message_bytes, int32_t max_channels);
// Then: as many channels as there is work for.
int32_t NumLlChannels(int64_t message_bytes, int32_t max_channels);

// How data gets from node to node.
enum class InterNode : uint8_t {
  kSendRecv,  // NCCL's sends and receives, between the kernels that the plan is cut into
  kGin,       // puts of the kernel that walks the plan
};

// A whole GPU as the cost model sees it; its channels have equal parts of the bandwidths.
Machine GpuMachine(InterNode inter_node);

struct Selection {
  Choice choice;             // step by step: for the elements that the largest channel has of a block
  int32_t num_channels = 0;  // thread blocks
};

// `request` is of whole blocks. The choice is by GpuMachine, whatever the machine is.
Selection SelectForGpus(const Request& request, const std::string& algorithm, int64_t item_bytes, int32_t max_channels,
                        InterNode inter_node);

// What a GPU does in such a call, and how long that should take if it is `gpu` rather than GpuMachine. Steps are those
// of one channel, all else is of all of them, LL flags included. In a round, channels share messages.
Cost CostOnGpus(const Request& request, const Selection& selection, int64_t item_bytes, std::optional<Machine> gpu,
                InterNode inter_node);

}  // namespace jaxcomm
