// A network between emulated nodes that does the least it may: puts read their source and arrive late and in any
// order; only a signal comes after the puts to the same rank that were before it.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "../../ffi/cuda/peer_network.cuh"

namespace jaxcomm {
namespace cuda {

// Of all channels and ranks of a launch.
class SlowLinks {
 public:
  using Link = std::tuple<int32_t, int32_t, int32_t>;  // channel, from, to

  explicit SlowLinks(uint64_t seed) : random_(seed), lazy_(random_() % 2 == 0) {}

  void Put(Link link, char* dst, const char* src, int64_t bytes) { messages_[link].push_back({dst, src, bytes}); }
  void Signal(Link link) { messages_[link].push_back({nullptr, nullptr, 0}); }
  uint64_t Signals(Link link) { return signals_[link]; }
  uint64_t NextWait(Link link) { return ++waits_[link]; }

  // Lets one message arrive. Lazy links deliver what somebody waits for and nothing else: what `from` has sent to `to`;
  // -1: to anybody.
  void Deliver(int32_t channel, int32_t from, int32_t to) {
    std::vector<Link> busy;
    for (const auto& [link, messages] : messages_) {
      const bool wanted = link == Link(channel, from, to < 0 ? std::get<2>(link) : to);
      if (!messages.empty() && (wanted || !lazy_)) busy.push_back(link);
    }
    if (busy.empty()) return;
    const Link link = busy[random_() % busy.size()];
    std::deque<Message>& messages = messages_[link];
    const auto signal = std::find_if(messages.begin(), messages.end(), [](const Message& m) { return m.bytes == 0; });
    const auto num_puts = static_cast<size_t>(signal - messages.begin());
    auto chosen = messages.begin() + (num_puts > 0 ? random_() % num_puts : 0);
    if (chosen->bytes > 0) {
      std::copy(chosen->src, chosen->src + chosen->bytes, chosen->dst);
    } else {
      ++signals_[link];
    }
    messages.erase(chosen);
  }

  bool Sending(int32_t channel, int32_t from) const {
    for (const auto& [link, messages] : messages_) {
      if (std::get<0>(link) != channel || std::get<1>(link) != from) continue;
      if (std::any_of(messages.begin(), messages.end(), [](const Message& m) { return m.bytes > 0; })) return true;
    }
    return false;
  }

  bool empty() const {
    return std::all_of(messages_.begin(), messages_.end(), [](const auto& entry) { return entry.second.empty(); });
  }

 private:
  struct Message {
    char* dst;
    const char* src;
    int64_t bytes;  // 0: a signal
  };
  std::mt19937_64 random_;
  const bool lazy_;
  std::map<Link, std::deque<Message>> messages_;
  std::map<Link, uint64_t> signals_;  // that have arrived
  std::map<Link, uint64_t> waits_;
};

class DelayedNetwork {
 public:
  DelayedNetwork(const PeerNetworkArgs& args, SlowLinks& links) : args_(args), links_(links) {}

  void Put(int32_t channel, const Place& to, int64_t offset, const char* src, int64_t bytes) {
    if (threadIdx.x != 0) return;
    const device::Window& window = to.space == Space::kInput    ? args_.input
                                   : to.space == Space::kOutput ? args_.output
                                                                : args_.scratch;
    links_.Put({channel, rank(), to.rank}, window.At(to.rank, offset), src, bytes);
  }
  void Signal(int32_t channel, int32_t peer) { links_.Signal({channel, rank(), peer}); }
  bool Wait(int32_t channel, int32_t peer, int32_t origin) {
    const SlowLinks::Link link(channel, peer, rank());
    const uint64_t expected = links_.NextWait(link);
    const uint64_t begin = emulation::NowNs();
    while (links_.Signals(link) < expected) {
      if (emulation::NowNs() - begin > args_.comm.timeout_ns) {
        device::Fail(args_.comm, channel, peer, origin, expected, links_.Signals(link));
        return false;
      }
      links_.Deliver(channel, peer, rank());
      emulation::Pause();
    }
    return true;
  }
  bool Flush(int32_t channel) {
    while (links_.Sending(channel, rank())) {
      links_.Deliver(channel, rank(), -1);
      emulation::Pause();
    }
    return true;
  }

 private:
  int32_t rank() const { return args_.comm.world.rank; }

  const PeerNetworkArgs& args_;
  SlowLinks& links_;
};

}  // namespace cuda
}  // namespace jaxcomm
