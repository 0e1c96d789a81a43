// All ranks of a group in one memory and one launch: the kernel arguments of one collective. The memory is that of the
// emulation or of a GPU.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../../ffi/cuda/kernels/executor.cuh"
#include "../../../ffi/cuda/program/program.h"
#include "peer_network.cuh"

namespace jaxcomm {
namespace cuda {

using Bytes = std::vector<char>;

// Zeroed memory that lives as long as this object, with functions to write it.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual char* Take(int64_t bytes) = 0;
  virtual void Write(void* to, const void* from, int64_t bytes) = 0;

  template <typename T>
  T* Upload(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    char* to = Take(bytes);
    if (bytes > 0) Write(to, values.data(), bytes);
    return reinterpret_cast<T*>(to);
  }
};

class HostMemory : public Memory {
 public:
  char* Take(int64_t bytes) override {
    // Exactly the requested size, so that sanitizers detect accesses outside. operator new aligns to 16.
    blocks_.push_back(std::unique_ptr<char[]>(new char[bytes > 0 ? bytes : 1]()));
    return blocks_.back().get();
  }
  void Write(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, bytes); }

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
};

// Counters live longer than calls, as those of a communicator do.
struct Counters {
  std::vector<uint64_t*> sent, received;  // by rank
  char* pads = nullptr;
  int64_t pad_bytes = 0;  // from the pad of a rank to that of the next
};

inline Counters MakeCounters(Memory& memory, int32_t num_ranks, int32_t team_size, int32_t num_channels) {
  Counters counters;
  counters.pad_bytes = static_cast<int64_t>(num_channels) * team_size * sizeof(uint64_t);
  counters.pads = memory.Take(num_ranks * counters.pad_bytes);
  for (int32_t r = 0; r < num_ranks; ++r) {
    counters.sent.push_back(reinterpret_cast<uint64_t*>(memory.Take(counters.pad_bytes)));
    counters.received.push_back(reinterpret_cast<uint64_t*>(memory.Take(counters.pad_bytes)));
  }
  return counters;
}

// A group whose ranks are the rows of one launch.
class VirtualRanks {
 public:
  VirtualRanks(Memory& memory, Geometry geometry, int32_t num_channels, uint64_t timeout_ns)
      : geometry_(geometry),
        num_channels_(num_channels),
        timeout_ns_(timeout_ns),
        intra_node_(MakeCounters(memory, n(), geometry.ranks_per_node, num_channels)),
        inter_node_(MakeCounters(memory, n(), n(), num_channels)),
        reports_(memory.Upload(std::vector<device::Report>(n()))),
        abort_flags_(memory.Upload(std::vector<uint64_t>(n()))),
        num_calls_(memory.Upload(std::vector<uint64_t>(n()))) {}

  struct Call {
    RankArgs* args = nullptr;  // by rank
    std::vector<RankArgs> args_on_host;
    PeerNetworkArgs* network = nullptr;
    std::vector<char*> inputs, outputs, scratch;  // by rank
    int32_t num_channels = 0;

    // Lets the kernels of every rank for which use(rank) is true make bulk copies.
    template <typename Use>
    void UseBulkCopies(Memory& memory, const BulkStages& stages, Use use) {
      shared_bytes = static_cast<size_t>(BulkSharedBytes(stages));
      for (size_t r = 0; r < args_on_host.size(); ++r) args_on_host[r].bulk = use(r) ? stages : BulkStages{};
      memory.Write(args, args_on_host.data(), static_cast<int64_t>(args_on_host.size() * sizeof(RankArgs)));
    }
    size_t shared_bytes = 0;  // of a thread block
  };

  // Buffers have `stride` bytes per rank, which is a multiple of 16, and begin `shift` bytes after a multiple of 16.
  // `pack`: how kernels pack the messages between nodes.
  Call Prepare(Memory& memory, const Choice& choice, int64_t block_count, ContiguousCounts contiguous,
               Operation operation, int32_t num_channels, int64_t shift = 0, PackLimits pack = {}) const {
    const int64_t item_bytes = ItemBytes(operation.dtype);
    Request whole = choice.request;
    whole.block_count = block_count;
    Call call;
    call.num_channels = num_channels;
    std::vector<RankProgram> programs;
    int64_t scratch_count = 0;
    for (int32_t r = 0; r < n(); ++r) {
      programs.push_back(MakeRankProgram(choice, block_count, contiguous, item_bytes, num_channels, r, pack));
      scratch_count = std::max(scratch_count, programs[r].scratch_count);
    }
    const auto take = [&](int64_t bytes, std::vector<char*>& by_rank) {
      const int64_t stride = (bytes + 15) / 16 * 16;
      char* base = memory.Take(n() * stride + shift) + shift;
      for (int32_t r = 0; r < n(); ++r) by_rank.push_back(base + r * stride);
      return device::Window{base, stride};
    };
    const device::Window input = take(InputCount(whole) * item_bytes, call.inputs);
    const device::Window output = take(OutputCount(whole) * item_bytes, call.outputs);
    const device::Window scratch = take(scratch_count * item_bytes, call.scratch);
    std::vector<RankArgs> args(n());
    std::vector<PeerNetworkArgs> network(n());
    for (int32_t r = 0; r < n(); ++r) {
      args[r].comm = CommOfNode(r);
      const auto of_node = [&](const device::Window& all) {
        return device::Window{all.At(args[r].comm.local.first), all.stride};
      };
      args[r].input = of_node(input);
      args[r].output = of_node(output);
      args[r].scratch = of_node(scratch);
      args[r].steps = memory.Upload(programs[r].steps);
      args[r].sources = memory.Upload(programs[r].sources);
      args[r].channels = memory.Upload(programs[r].channels);
      args[r].operation = operation;
      args[r].item_bytes = static_cast<int32_t>(item_bytes);
      args[r].ranks_per_node = geometry_.ranks_per_node;
      network[r] = {CommOf(r, {r, n(), 0, 1}, inter_node_), input, output, scratch};
    }
    call.args = memory.Upload(args);
    call.args_on_host = args;
    call.network = memory.Upload(network);
    return call;
  }

  device::Comm CommOfNode(int32_t rank) const {
    const int32_t per_node = geometry_.ranks_per_node, first = rank / per_node * per_node;
    return CommOf(rank, {rank - first, per_node, first, 1}, intra_node_);
  }

  int32_t n() const { return geometry_.num_ranks(); }
  device::Report* reports() const { return reports_; }
  const Counters& intra_node() const { return intra_node_; }

 private:
  device::Comm CommOf(int32_t rank, device::Team local, const Counters& counters) const {
    device::Comm comm;
    comm.world = {rank, n(), 0, 1};
    comm.local = local;
    comm.signals.pad = {counters.pads + local.first * counters.pad_bytes, counters.pad_bytes};
    comm.signals.sent = counters.sent[rank];
    comm.signals.received = counters.received[rank];
    comm.signals.num_channels = num_channels_;
    comm.timeout_ns = timeout_ns_;
    comm.report = reports_ + rank;
    comm.abort_flag = abort_flags_ + rank;
    comm.num_calls = num_calls_ + rank;
    return comm;
  }

  const Geometry geometry_;
  const int32_t num_channels_;
  const uint64_t timeout_ns_;
  const Counters intra_node_;
  const Counters inter_node_;
  device::Report* const reports_;
  uint64_t* const abort_flags_;  // of a GPU per rank
  uint64_t* const num_calls_;
};

// The LL slots of a group of one node.
class VirtualSlots {
 public:
  VirtualSlots(Memory& memory, int32_t num_ranks, int32_t num_channels, int32_t num_units)
      : n_(num_ranks), num_channels_(num_channels), num_units_(num_units) {
    pads_ = memory.Take(n_ * pad_bytes());
    for (int32_t r = 0; r < n_; ++r) {
      epochs_.push_back(reinterpret_cast<uint64_t*>(memory.Take(num_channels * int64_t{sizeof(uint64_t)})));
    }
  }

  device::LlSlots Of(int32_t rank) const { return {{pads_, pad_bytes()}, epochs_[rank], num_channels_, num_units_}; }
  char* pads() const { return pads_; }
  int64_t pad_bytes() const { return int64_t{2} * num_channels_ * n_ * num_units_ * 16; }

 private:
  const int32_t n_, num_channels_, num_units_;
  char* pads_ = nullptr;
  std::vector<uint64_t*> epochs_;  // by rank
};

// Ends the test if a rank has other results than expected, has not told the host that its calls have ended, or has
// aborted. `what` and the seed draw the call again.
inline void CheckRank(bool same, const device::Report& report, const std::string& what, int32_t rank, uint64_t seed,
                      size_t place) {
  const device::Progress& progress = report.progress;
  const bool ended = progress.ended > 0 && progress.ended == progress.begun >> 32;
  if (same && ended && report.state == device::Report::kNone) return;
  std::fprintf(stderr, "%s, seed %llu, call %zu: rank %d %s (report: state %llu, step %d, peer %d)\n", what.c_str(),
               static_cast<unsigned long long>(seed), place, rank, same ? "did not end" : "has other results",
               static_cast<unsigned long long>(report.state), report.step, report.peer);
  std::exit(1);
}

}  // namespace cuda
}  // namespace jaxcomm
