// The two streams of a call that is split at its messages between nodes (ffi/cuda/program/send_recv_schedule.h), for
// all ranks in one emulated launch. A kernel begins when the previous kernel of its stream has ended in all thread
// blocks. Only the host's actions order the streams. Messages behave as NCCL's in a group: they are matched in order
// between each two ranks, the source is read until the receiver has the data, and a round ends when all of its messages
// have ended.
#pragma once

#include <cstring>
#include <vector>

#include "../../check.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

class TwoStreams {
 public:
  explicit TwoStreams(const VirtualRanks::Call& call)
      : call_(call), n_(call.inputs.size()), ranks_(n_), links_(n_ * n_) {
    for (size_t r = 0; r < n_; ++r) {
      for (const Round& round : call.schedules[r].rounds) {
        for (const Transfer& transfer : round.sends) links_[r * n_ + transfer.peer].emplace_back();
      }
      ranks_[r].received.resize(n_);
      ranks_[r].sent.resize(n_);
    }
  }

  // Called by all thread blocks of channels.
  void RunFirst() {
    Rank& rank = ranks_[blockIdx.y];
    uint64_t num_joins = 0;
    Join(rank, ++num_joins);
    for (const Action& action : call_.schedules[blockIdx.y].actions) {
      if (action.kind == Action::kLaunch) {
        RunLaunch(action.number, static_cast<int32_t>(blockIdx.x));
        Join(rank, ++num_joins);
      } else if (action.kind == Action::kPost) {
        if (blockIdx.x == 0 && threadIdx.x == 0) device::StoreRelease(&rank.posted, action.number + 1);
      } else {
        Until(&rank.done, action.number + 1);
      }
    }
  }

  void RunSecond() {
    Rank& rank = ranks_[blockIdx.y];
    const std::vector<Round>& rounds = call_.schedules[blockIdx.y].rounds;
    for (size_t i = 0; i < rounds.size(); ++i) {
      Until(&rank.posted, i + 1);
      if (threadIdx.x == 0) Exchange(rank, rounds[i]);
      __syncthreads();
      for (int32_t c = 0; c < call_.num_channels && rounds[i].unpack >= 0; ++c) RunLaunch(rounds[i].unpack, c);
      __syncthreads();
      if (threadIdx.x == 0) device::StoreRelease(&rank.done, i + 1);
    }
  }

 private:
  struct Offer {
    const char* data = nullptr;
    int64_t bytes = 0;
    uint64_t state = 0;  // 1: offered, 2: taken
  };
  struct Rank {
    uint64_t joined = 0;  // by thread blocks of channels
    uint64_t posted = 0, done = 0;
    std::vector<size_t> received, sent;  // messages, by peer
  };

  void RunLaunch(int32_t number, int32_t channel) {
    RankArgs args = call_.args[blockIdx.y];
    args.channels += static_cast<int64_t>(number) * call_.num_channels;
    NoNetwork network;
    ChannelExecutor<NoNetwork> executor(args, network, channel, device::DynamicShared());
    executor.Run();
    __syncthreads();
  }

  // Stream order: a kernel begins only after all of the previous kernel.
  void Join(Rank& rank, uint64_t number) {
    __syncthreads();
    if (threadIdx.x == 0) __atomic_fetch_add(&rank.joined, 1, __ATOMIC_ACQ_REL);
    Until(&rank.joined, number * static_cast<uint64_t>(call_.num_channels));
  }

  static void Spin(const uint64_t* word, uint64_t value) {
    constexpr uint64_t kStuckNs = 1'000'000'000;
    const uint64_t begin = emulation::NowNs();
    while (device::LoadAcquire(word) < value) {
      emulation::Pause();
      CHECK(emulation::NowNs() - begin < kStuckNs);  // otherwise a round would never end
    }
  }
  static void Until(const uint64_t* word, uint64_t value) {
    if (threadIdx.x == 0) Spin(word, value);
    __syncthreads();
  }

  char* At(int64_t element) const { return call_.scratch[blockIdx.y] + element * call_.args[blockIdx.y].item_bytes; }

  void Exchange(Rank& rank, const Round& round) {
    const size_t own = blockIdx.y;
    const int64_t item = call_.args[own].item_bytes;
    std::vector<Offer*> offered;
    for (const Transfer& transfer : round.sends) {
      Offer& offer = links_[own * n_ + transfer.peer][rank.sent[transfer.peer]++];
      offer.data = At(transfer.begin);
      offer.bytes = transfer.count * item;
      device::StoreRelease(&offer.state, 1);
      offered.push_back(&offer);
    }
    for (const Transfer& transfer : round.receives) {
      std::vector<Offer>& link = links_[transfer.peer * n_ + own];
      const size_t number = rank.received[transfer.peer]++;
      CHECK(number < link.size());
      Spin(&link[number].state, 1);
      CHECK(link[number].bytes == transfer.count * item);
      std::memcpy(At(transfer.begin), link[number].data, link[number].bytes);
      device::StoreRelease(&link[number].state, 2);
    }
    for (Offer* offer : offered) Spin(&offer->state, 2);
  }

  const VirtualRanks::Call& call_;
  const size_t n_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<Offer>> links_;  // from * n + to
};

}  // namespace cuda
}  // namespace jaxcomm
