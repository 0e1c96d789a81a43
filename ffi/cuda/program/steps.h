// What the programs of groups of one node (program.cc) and of several (send_recv_schedule.cc) are made of.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/program/packing.h"
#include "cuda/program/program.h"
#include "plan/partition.h"
#include "plan/select_for_gpus.h"

namespace jaxcomm {
namespace cuda {

// The steps of one channel's plan, with those of entering and leaving. Of the other ranks' plans, only what is put to
// other nodes counts, and what is written to this rank's memory.
std::vector<ProgramStep> StepsOf(const std::vector<Plan>& plans, const Request& request, const Fragments& fragments,
                                 int32_t rank);

// Marks the steps as flat, and changes their offsets, that touch no more than one block of each buffer, or whose
// channel has all of them, where blocks lie one after the other. `block_count`, `whole_count`: elements of a block of
// the channel and of all channels.
void Flatten(std::vector<ProgramStep>& steps, std::vector<Place>& sources, int64_t block_count, int64_t whole_count,
             Runs runs);

// The range of every block in a buffer of `buffer_count` elements.
ChannelSlice SliceOf(int64_t buffer_count, int64_t block_count, Range range, int64_t run);

// What ranks touch of each other's buffers, and what the network reads from.
void AddShares(const std::vector<Plan>& plans, const Geometry& geometry, RankProgram& program);

}  // namespace cuda
}  // namespace jaxcomm
