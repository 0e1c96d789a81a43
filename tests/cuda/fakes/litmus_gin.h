// NCCL's GIN in programs for memory_model.h, under the names that gin_network.cuh uses: no order but what GIN promises.
// A put's source is read at any time until its counter rises; the data arrives at any time until a later strong signal
// on the same context to the same rank does. A NIC carries out an operation when a thread posts it: later writes of the
// source are races unless a counter orders them after the operation.
#pragma once

#include <cstdint>
#include <vector>

// clang-format off: NCCL's names go before their users
#include "gin_names.h"
#include "../../../ffi/cuda/program/gin_args.h"
// clang-format on
#include "memory_model.h"

struct ncclDevComm {
  int rank = 0;
  uint32_t ginContextCount = 1;
  uint64_t* signals = nullptr;   // [rank][signal]
  uint64_t* counters = nullptr;  // [rank][counter]
  // Of this rank, by peer: orders arrivals before strong signals. A word that only NICs change.
  uint64_t* arrivals = nullptr;
  uint32_t num_signals = 0;
};

class ncclGin {
 public:
  ncclGin(const ncclDevComm& comm, int) : comm_(comm) {}

  void put(ncclTeam, int peer, ncclWindow_t to, size_t to_offset, ncclWindow_t from, size_t from_offset, size_t bytes,
           ncclGin_None, ncclGin_WeakCounterInc action, ncclCoopThread, ncclGin_None, cuda::thread_scope,
           cuda::thread_scope required) const {
    memory_model::Require(required == cuda::thread_scope_system, "the network is not part of the GPU");
    const char* const source = from->base + comm_.rank * from->stride + from_offset;
    const auto count = static_cast<int64_t>(bytes);
    memory_model::NicOperation reader, writer;
    reader.Read(source, count);
    writer.Follow(reader);
    writer.Write(to->base + peer * to->stride + to_offset, source, count);
    writer.Increment(comm_.arrivals + peer);
    reader.Increment(comm_.counters + action.counter);
  }

  void signal(ncclTeam, int peer, ncclGin_StrongSignalInc action, ncclCoopThread, ncclGin_None, cuda::thread_scope,
              cuda::thread_scope required) const {
    memory_model::Require(required == cuda::thread_scope_system, "the network is not part of the GPU");
    memory_model::NicOperation signaller;
    signaller.Follow(comm_.arrivals + peer);
    signaller.Increment(comm_.signals + peer * static_cast<int64_t>(comm_.num_signals) + action.signal);
  }

  uint64_t readSignal(ncclGinSignal_t signal) const {
    return memory_model::Load(comm_.signals + comm_.rank * static_cast<int64_t>(comm_.num_signals) + signal,
                              memory_model::kSystem, memory_model::kAcquire);
  }
  uint64_t readCounter(ncclGinCounter_t counter) const {
    return memory_model::Load(comm_.counters + counter, memory_model::kSystem, memory_model::kAcquire);
  }

 private:
  const ncclDevComm& comm_;
};

namespace jaxcomm {
namespace cuda {

// By rank.
inline std::vector<ncclDevComm> NcclCommsOf(memory_model::Program& program, int32_t num_ranks, int32_t num_channels) {
  const int32_t num_signals = NumGinSignals(num_channels, num_ranks);
  auto* const signals = program.Words<uint64_t>(num_ranks * num_signals, "GIN signals");
  std::vector<ncclDevComm> comms(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) {
    comms[r].rank = r;
    comms[r].signals = signals;
    comms[r].num_signals = static_cast<uint32_t>(num_signals);
    comms[r].counters = program.Words<uint64_t>(NumGinCounters(num_channels), "GIN counters");
    comms[r].arrivals = program.Words<uint64_t>(num_ranks, "arrivals");
  }
  return comms;
}

}  // namespace cuda
}  // namespace jaxcomm
