// Which algorithm a call on GPUs runs, and on how many channels: all ranks come to the same without asking each other.
// Knows nothing of CUDA, so that jaxcomm.explain can ask without a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../plan/layout.h"
#include "../plan/select.h"

namespace jaxcomm {
namespace cuda {

// As many channels as there is work for, of at most `max_channels`.
int32_t NumChannels(int64_t block_bytes, int32_t max_channels);
// Elements [begin, begin + count) of every block, for one channel.
Range ChannelRange(int64_t block_count, int64_t item_bytes, int32_t num_channels, int32_t channel);
// Elements of a block that the largest channel gets.
int64_t ChannelCount(int64_t block_count, int64_t item_bytes, int32_t num_channels);

// Whether messages are small enough for flags.
bool FitsFlagged(int64_t message_bytes, int32_t max_channels);
// Then: as many channels as there is work for.
int32_t NumFlaggedChannels(int64_t message_bytes, int32_t max_channels);

// A whole GPU as the cost model sees it; its channels have equal parts of the bandwidths. `gin`: kernels reach the
// other nodes; else messages go in rounds.
Machine GpuMachine(bool gin);

struct Selection {
  Choice choice;             // step by step: for the elements that the largest channel has of a block
  int32_t num_channels = 0;  // thread blocks
};

// `request` is of whole blocks. The choice is by GpuMachine, whatever the machine is.
Selection SelectForGpus(const Request& request, const std::string& algorithm, int64_t item_bytes, int32_t max_channels,
                        bool gin);

// What a GPU does in such a call, and how long that should take if it is `gpu` rather than GpuMachine. Steps are those
// of one channel, all else is of all of them, flags included. In a round, channels share messages.
Cost CostOnGpus(const Request& request, const Selection& selection, int64_t item_bytes, std::optional<Machine> gpu,
                bool gin);

}  // namespace cuda
}  // namespace jaxcomm
