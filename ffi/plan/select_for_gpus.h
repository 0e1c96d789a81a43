// Selects the algorithm of a call on GPUs and its number of channels. All ranks compute the same selection without
// communication. Does not need CUDA, so jaxcomm.explain works without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/partition.h"
#include "plan/select.h"

namespace jaxcomm {

// Slices of channels begin at multiples of this, so that every channel can move 16 bytes at a time.
constexpr int64_t kGrainBytes = 128;

// Moves of a channel to or from peers of the node run at once, on different warps, if none has more bytes than this. A
// block of threads keeps 48 KiB in flight, so longer moves fill the link one by one, and then a late peer delays only
// its own move. Not measured.
constexpr int64_t kTogetherBytes = 256 << 10;

// Limits of an LL call: units that a rank sends to a peer per channel, and the number of channels. A slot holds a unit
// and its flag, which doubles its size, and there are two sets of slots: 256 KiB per peer. Not measured.
constexpr int32_t kLlUnitBytes = 8;
constexpr int32_t kLlUnits = 1024;
constexpr int32_t kLlBytes = kLlUnits * kLlUnitBytes;
constexpr int32_t kLlChannels = 8;

// The number of channels that the size of a block justifies, at most `max_channels`.
int32_t NumChannels(int64_t block_bytes, int32_t max_channels);
// The same for all_to_all_v, whose slices are spread over the channels by their addresses. Slices that begin at
// multiples of a power of two would share few of an even number of channels. So the number is odd if it is above 2.
int32_t NumSliceChannels(int64_t block_bytes, int32_t max_channels);
// The slice of every block that one channel moves.
Range ChannelRange(int64_t block_count, int64_t item_bytes, int32_t num_channels, int32_t channel);
// Elements of the largest slice.
int64_t ChannelCount(int64_t block_count, int64_t item_bytes, int32_t num_channels);

// Whether messages are small enough for LL.
bool FitsLl(int64_t message_bytes, int32_t max_channels);
// The number of channels that such a message justifies.
int32_t NumLlChannels(int64_t message_bytes, int32_t max_channels);

// How data moves between nodes.
enum class InterNode : uint8_t {
  kSendRecv,  // NCCL send/receive, between the kernels that the plan is split into
  kGin,       // puts by the kernel that executes the plan
};

// The machine model of a GPU, whose peers access an arena. Channels share its bandwidths equally.
Machine GpuMachine(InterNode inter_node);

struct Selection {
  Choice choice;             // without LL: for the largest slice of a block
  int32_t num_channels = 0;  // thread blocks
};

// `request` is for whole blocks. The selection uses GpuMachine on every machine. `arena`: Machine::arena. Fails as
// Select does.
StatusOr<Selection> SelectForGpus(const Request& request, const std::string& algorithm, int64_t item_bytes,
                                  int32_t max_channels, InterNode inter_node, bool arena = true);

// The cost of a call with this selection on `gpu`; without a value, on GpuMachine. `steps` counts those of one channel;
// traffic and scratch are totals of all channels, including LL flags. With send/receive, channels share the messages
// between nodes.
Cost CostOnGpus(const Request& request, const Selection& selection, int64_t item_bytes, std::optional<Machine> gpu,
                InterNode inter_node);

}  // namespace jaxcomm
