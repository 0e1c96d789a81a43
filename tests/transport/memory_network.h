// A fake network: all processes are objects of one process, and time is virtual. The seed determines the order of
// messages, delays and losses, as long as only one thread sends and steps.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/transport/network.h"

namespace jaxcomm {

struct MemoryNetworkOptions {
  double bytes_per_ns = 1.0;  // of each ordered pair of processes
  int64_t jitter_ns = 0;      // added to every message, uniform in [0, jitter_ns]
  uint64_t seed = 0;
};

class MemoryEndpoint;

// Must outlive its networks.
class MemoryFabric {
 public:
  MemoryFabric(int num_processes, const MemoryNetworkOptions& options);
  ~MemoryFabric();

  // The network of one process; once per process.
  std::unique_ptr<Network> Attach(int process, uint64_t token, Receiver* receiver);

  // Runs the next event on the calling thread, which acts as the progress thread. False: there is no event before
  // `before_ns`.
  bool Step(int64_t before_ns = std::numeric_limits<int64_t>::max());
  // Starts a thread that steps as fast as it can.
  void Start();
  uint64_t bytes_sent(int from, int to) const;  // of payloads

  // Simulates the death of the process: it sends and receives nothing more, and the others get OnPeerLost
  // later.
  void Lose(int process);

 private:
  friend class MemoryEndpoint;
  friend class MemoryPayload;

  using EventId = std::pair<int64_t, uint64_t>;  // time, then order of creation

  struct Outstanding {  // a Send whose `sent` has not been called
    int from = -1;
    int to = -1;
    const void* data = nullptr;
    size_t bytes = 0;
    SentFn sent;
  };
  struct UnderWay {  // a payload that is being fetched
    int from = -1;
    int to = -1;
    std::function<void(bool)> done;
  };

  // With mutex_ held.
  void At(int64_t time_ns, std::function<void()> event);
  int64_t Transmit(int from, int to, size_t bytes);  // when the last byte arrives

  bool TakeOutstanding(uint64_t id, Outstanding* message);
  void FailOutstanding(const std::function<bool(const Outstanding&)>& which);
  void Fetch(uint64_t id, void* destination, std::function<void(bool)> done);
  void Break(int process, int peer, const std::string& why);
  void Detach(int process);

  const int num_processes_;
  const MemoryNetworkOptions options_;

  std::mutex stepping_;  // held while an event runs; taken before mutex_
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t now_ns_ = 0;
  uint64_t num_events_ = 0;
  std::map<EventId, std::function<void()>> events_;
  std::mt19937_64 random_;
  std::vector<int64_t> link_free_ns_;  // [from * n + to]
  std::vector<bool> lost_;
  std::vector<MemoryEndpoint*> endpoints_;
  std::map<uint64_t, Outstanding> outstanding_;
  std::map<EventId, UnderWay> under_way_;  // by arrival
  uint64_t next_outstanding_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace jaxcomm
