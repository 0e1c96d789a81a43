// Channels of a call on GPUs, and the machine model of a GPU. All ranks compute the same numbers without communication.
#pragma once

#include <cstdint>

#include "plan/cost.h"
#include "plan/partition.h"

namespace jaxcomm {

// Slices of channels begin at multiples of this, so that every channel can move 16 bytes at a time.
constexpr int64_t kGrainBytes = 128;

// Moves of a channel to or from peers of the node run at once, on different warps, if none has more bytes than this. A
// block of threads keeps 48 KiB in flight, so longer moves fill the link one by one, and then a late peer delays only
// its own move. Not measured.
constexpr int64_t kConcurrentBytes = 256 << 10;

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

// The most channels of an asynchronous call: computations run beside its kernel. An estimate from published settings of
// 2 to 12 SMs for transfers beside products; not measured.
constexpr int32_t kAsynchronousChannels = 8;

// The pieces of rows that the channels of a dispatch or combine move.
struct RowPieces {
  int64_t piece_bytes = 0;  // of every row, for each channel but the last
  int32_t num_channels = 1;
};
// `bytes_per_pair`: bytes of the rows from one rank to another.
RowPieces PiecesOf(int64_t row_bytes, int64_t bytes_per_pair, int32_t max_channels);

// The machine model of a GPU whose peers access an arena, with GIN between nodes. Channels share its bandwidths
// equally.
Machine GpuMachine();
// One of `num_channels` channels of a GPU.
Machine ChannelMachine(Machine gpu, int32_t num_channels);

}  // namespace jaxcomm
