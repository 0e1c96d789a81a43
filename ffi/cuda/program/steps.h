// Functions shared by the programs of groups of one node (program.cc) and of several nodes (send_recv_schedule.cc).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/program/packing.h"
#include "cuda/program/program.h"
#include "plan/partition.h"
#include "plan/channels.h"

namespace jaxcomm {
namespace cuda {

// The most elements of a short move. Short moves that do not depend on each other run at once.
inline int64_t ShortMove(int64_t item_bytes) { return std::max<int64_t>(kTogetherBytes / item_bytes, 1); }

// The steps of one channel's plan, with the entry and exit barriers. Of the other ranks' plans, only puts to other
// nodes and writes to this rank's memory matter. In a group of one node, the order is that of WaitsFirst.
std::vector<ProgramStep> StepsOf(const std::vector<Plan>& plans, const Request& request, const Fragments& fragments,
                                 int32_t rank, int64_t short_move);

// Marks a step as flat and converts its offsets if blocks lie one after the other, and the step touches no more than
// one block of each buffer or the channel has all elements of the blocks. `block_count`, `whole_count`: elements of a
// block of the channel and of all channels.
void Flatten(std::vector<ProgramStep>& steps, std::vector<Place>& sources, int64_t block_count, int64_t whole_count,
             ContiguousCounts contiguous);

// Marks consecutive short moves inside the node that run at once. Precondition: flat steps are marked.
void GroupMoves(std::vector<ProgramStep>& steps, const Geometry& geometry, int64_t short_move);

// The slice that has `range` of every block in a buffer of `buffer_count` elements.
ChannelSlice SliceOf(int64_t buffer_count, int64_t block_count, Range range, int64_t contiguous_count);

// Records which buffers peers access and which the network reads.
void AddShares(const std::vector<Plan>& plans, const Geometry& geometry, RankProgram& program);

}  // namespace cuda
}  // namespace jaxcomm
