// The contract of Network, checked through its interface alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/transport/network.h"
#include "../check.h"

namespace jaxcomm {

// The messages of the tests: message `index` of a channel has `bytes` bytes, which sender, channel and index determine.
struct TestHeader {
  uint64_t index = 0;
  uint64_t bytes = 0;
};

inline uint8_t PatternByte(int process, uint64_t channel, uint64_t index, size_t i) {
  return static_cast<uint8_t>(process * 31 + channel * 17 + index * 7 + i + (i >> 8));
}

inline std::vector<uint8_t> Pattern(int process, uint64_t channel, uint64_t index, size_t bytes) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = PatternByte(process, channel, index, i);
  return data;
}

// A process of a test: checks every byte and the order in each channel.
class TestProcess : public Receiver {
 public:
  enum class Place { kAtOnce, kLater, kMixed };

  explicit TestProcess(int process, Place place = Place::kAtOnce) : process_(process), place_(place) {}
  ~TestProcess() override { Leave(); }

  void Join(std::unique_ptr<Network> network) { network_ = std::move(network); }
  void Leave() { network_.reset(); }
  Network& network() { return *network_; }

  void* OnMessage(const Message& message) override {
    std::lock_guard<std::mutex> lock(mutex_);
    CHECK(message.bytes > 0 && HeaderOf(message).bytes == message.bytes);
    std::vector<uint8_t>& buffer = buffers_[{message.process, message.id}];
    buffer.assign(message.bytes, 0xee);
    const bool later = place_ == Place::kLater || (place_ == Place::kMixed && random_() % 2 == 0);
    if (!later) return buffer.data();
    waiting_.push_back({message.process, message.id});
    changed_.notify_all();
    return nullptr;
  }

  void OnDelivered(const Message& message) override {
    std::lock_guard<std::mutex> lock(mutex_);
    CHECK(!lost_.count(message.process));
    const TestHeader header = HeaderOf(message);
    uint64_t& next = next_[{message.process, message.channel}];
    CHECK(header.index >= next);
    if (!gaps_allowed_) CHECK(header.index == next);
    next = header.index + 1;
    if (message.bytes > 0) {
      const auto it = buffers_.find({message.process, message.id});
      CHECK(it != buffers_.end());
      CHECK(it->second == Pattern(message.process, message.channel, header.index, message.bytes));
      buffers_.erase(it);
    }
    if (on_delivered) on_delivered(message);
    ++delivered_;
    changed_.notify_all();
  }

  void OnPeerLost(int process, const std::string& why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    CHECK(!why.empty() && !lost_.count(process));
    lost_[process] = why;
    for (auto it = buffers_.begin(); it != buffers_.end();) {  // the network may not write there any more
      it = it->first.first == process ? buffers_.erase(it) : std::next(it);
    }
    changed_.notify_all();
  }

  // Sends a message whose data is valid, as promised, until `sent` and not longer.
  void Send(int to, uint64_t channel, uint64_t index, size_t bytes) {
    auto data = std::make_shared<std::vector<uint8_t>>(Pattern(process_, channel, index, bytes));
    TestHeader header;
    header.index = index;
    header.bytes = bytes;
    network_->Send(to, channel, &header, sizeof(header), data->data(), bytes, [this, data](bool ok) {
      std::fill(data->begin(), data->end(), 0xdd);
      std::lock_guard<std::mutex> lock(mutex_);
      ++(ok ? sent_ : unsent_);
      changed_.notify_all();
    });
  }

  // Gives all waiting messages their destinations, or none, the last message first.
  void AcceptAll(bool drop = false) {
    std::vector<std::pair<int, uint64_t>> waiting;
    std::vector<void*> places;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting.swap(waiting_);
      for (const auto& id : waiting) places.push_back(!drop && buffers_.count(id) ? buffers_[id].data() : nullptr);
      gaps_allowed_ |= drop;
    }
    for (size_t i = waiting.size(); i-- > 0;) network_->Accept(waiting[i].first, waiting[i].second, places[i]);
  }

  bool WaitUntil(const std::function<bool()>& reached) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(100), reached);
  }
  bool WaitDelivered(int64_t count) {
    return WaitUntil([&] { return delivered_ >= count; });
  }
  bool WaitWaiting(size_t count) {
    return WaitUntil([&] { return waiting_.size() >= count; });
  }
  bool WaitSent(int64_t count) {
    return WaitUntil([&] { return sent_ + unsent_ >= count; });
  }
  bool WaitLost(int process) {
    return WaitUntil([&] { return lost_.count(process) > 0; });
  }
  int64_t delivered() { return Locked(delivered_); }
  int64_t sent() { return Locked(sent_); }
  int64_t unsent() { return Locked(unsent_); }
  std::string why_lost(int process) {
    std::lock_guard<std::mutex> lock(mutex_);
    return lost_.count(process) ? lost_[process] : "";
  }

  // Called with the process locked: it must not use it.
  std::function<void(const Message&)> on_delivered;

 private:
  int64_t Locked(const int64_t& count) {
    std::lock_guard<std::mutex> lock(mutex_);
    return count;
  }
  static TestHeader HeaderOf(const Message& message) {
    TestHeader header;
    CHECK(message.header_bytes == sizeof(header));
    std::memcpy(&header, message.header, sizeof(header));
    return header;
  }

  const int process_;
  const Place place_;
  std::unique_ptr<Network> network_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_{7};
  std::map<std::pair<int, uint64_t>, std::vector<uint8_t>> buffers_;  // by sender and message
  std::vector<std::pair<int, uint64_t>> waiting_;
  std::map<std::pair<int, uint64_t>, uint64_t> next_;  // by sender and channel
  std::map<int, std::string> lost_;
  bool gaps_allowed_ = false;
  int64_t delivered_ = 0;
  int64_t sent_ = 0;
  int64_t unsent_ = 0;
};

// Makes the network of a process in a job of `num_processes`.
using MakeNetwork =
    std::function<std::unique_ptr<Network>(int process, int num_processes, uint64_t token, Receiver* receiver)>;

using Processes = std::vector<std::unique_ptr<TestProcess>>;

inline Processes JoinAll(const MakeNetwork& make, int num_processes, TestProcess::Place place) {
  Processes processes;
  for (int p = 0; p < num_processes; ++p) {
    processes.push_back(std::make_unique<TestProcess>(p, place));
    processes[p]->Join(make(p, num_processes, 0x1234567890abcdef, processes[p].get()));
  }
  for (int p = 0; p < num_processes; ++p) {
    for (int q = 0; q < num_processes; ++q) {
      if (p == q) continue;
      CHECK(processes[p]->network().Connect(q, processes[q]->network().address()).ok());
    }
  }
  return processes;
}

// Processes leave at the same time, as at the end of a job.
inline void LeaveAll(Processes& processes) {
  std::vector<std::thread> threads;
  for (auto& process : processes) threads.emplace_back([&] { process->Leave(); });
  for (std::thread& thread : threads) thread.join();
}

inline size_t SomeSize(std::mt19937& random) {
  constexpr size_t kSizes[] = {0, 0, 1, 8, 200, 1000, 1025, 5000, 16384, 65536, 70000, 300000, 1500000};
  return kSizes[random() % (sizeof(kSizes) / sizeof(kSizes[0]))];
}

// Messages of all sizes on two channels, all pairs at once, a thread for each: each channel in order, every byte right.
inline void CheckOrder(const MakeNetwork& make, TestProcess::Place place) {
  constexpr int kProcesses = 3;
  constexpr int kMessages = 40;
  Processes processes = JoinAll(make, kProcesses, place);
  std::vector<std::thread> senders;
  for (int i = 0; i < kProcesses * kProcesses * 2; ++i) {
    const int p = i / 2 / kProcesses, q = i / 2 % kProcesses, channel = i % 2;
    if (p == q) continue;
    senders.emplace_back([&, p, q, channel, random = std::mt19937(static_cast<unsigned>(i))]() mutable {
      for (uint64_t index = 0; index < kMessages; ++index) {
        processes[p]->Send(q, static_cast<uint64_t>(channel), index, SomeSize(random));
      }
    });
  }
  for (std::thread& sender : senders) sender.join();
  constexpr int64_t kExpected = (kProcesses - 1) * 2 * kMessages;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  // A large message has been sent only when its receiver has accepted it, so all processes accept until all are done.
  for (auto& process : processes) {
    while (process->delivered() < kExpected) {
      for (auto& other : processes) other->AcceptAll();
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  for (auto& process : processes) {
    CHECK(process->WaitSent(kExpected));
    CHECK(process->unsent() == 0);
  }
  LeaveAll(processes);
}

// A message without a destination delays its own channel and nothing else.
inline void CheckChannels(const MakeNetwork& make) {
  for (const size_t bytes : {size_t{100}, size_t{2000000}}) {
    Processes processes = JoinAll(make, 2, TestProcess::Place::kLater);
    std::vector<uint64_t> order;
    processes[1]->on_delivered = [&](const Message& message) { order.push_back(message.channel); };
    processes[0]->Send(1, 5, 0, bytes);
    processes[0]->Send(1, 5, 1, 0);
    processes[0]->Send(1, 6, 0, 0);
    processes[0]->Send(1, 7, 0, 0);
    CHECK(processes[1]->WaitDelivered(2));
    CHECK(processes[1]->WaitWaiting(1));
    CHECK((order == std::vector<uint64_t>{6, 7}));
    processes[1]->AcceptAll();
    CHECK(processes[1]->WaitDelivered(4));
    CHECK((order == std::vector<uint64_t>{6, 7, 5, 5}));
    // Dropped messages are not delivered, their senders get the memory back, and later messages are delivered.
    processes[0]->Send(1, 5, 2, bytes);
    processes[0]->Send(1, 5, 3, 0);
    CHECK(processes[1]->WaitWaiting(1));
    processes[1]->AcceptAll(true);
    CHECK(processes[1]->WaitDelivered(5));
    CHECK(processes[0]->WaitSent(6));
    CHECK(processes[0]->unsent() == 0);
    LeaveAll(processes);
  }
}

// A process leaves immediately after its last message. The message still arrives, then its peers get OnPeerLost.
inline void CheckLeaving(const MakeNetwork& make) {
  Processes processes = JoinAll(make, 3, TestProcess::Place::kLater);
  for (uint64_t index = 0; index < 100; ++index) processes[1]->Send(2, 0, index, index % 5 * 50);
  processes[1]->Leave();
  for (const int peer : {0, 2}) CHECK(processes[1]->why_lost(peer).empty());  // it gets no further call
  CHECK(processes[2]->WaitWaiting(80));
  CHECK(processes[0]->WaitLost(1));
  processes[2]->AcceptAll();
  CHECK(processes[2]->WaitLost(1));
  CHECK(processes[2]->delivered() == 100);
  for (const int peer : {0, 2}) CHECK(processes[peer]->why_lost(1) == "it disconnected");
  processes[2]->Send(1, 0, 0, 5000);
  CHECK(processes[2]->WaitSent(1));
  CHECK(processes[2]->unsent() == 1);
  processes[2]->Send(0, 0, 0, 0);  // the others continue
  CHECK(processes[0]->WaitDelivered(1));
  LeaveAll(processes);
}

// Leaving while messages have no destination yet, or are in flight: senders get all their memory back.
inline void CheckLeavingEarly(const MakeNetwork& make) {
  Processes processes = JoinAll(make, 2, TestProcess::Place::kLater);
  constexpr uint64_t kMessages = 20;
  for (uint64_t index = 0; index < kMessages; ++index) {
    for (const int p : {0, 1}) processes[p]->Send(1 - p, index % 3, index / 3, 100000);
  }
  CHECK(processes[1]->WaitWaiting(kMessages));
  processes[1]->AcceptAll();
  processes[1]->Leave();
  CHECK(processes[1]->WaitSent(kMessages));
  CHECK(processes[0]->WaitLost(1));
  CHECK(processes[0]->WaitSent(kMessages));
  LeaveAll(processes);
}

// The large payload of a peer that is dropped is not written any more, the peer gets OnPeerLost, the others continue.
inline void CheckDrop(const MakeNetwork& make) {
  Processes processes = JoinAll(make, 3, TestProcess::Place::kLater);
  processes[0]->Send(1, 0, 0, 100'000'000);
  processes[0]->Send(1, 1, 0, 0);
  CHECK(processes[1]->WaitWaiting(1) && processes[1]->WaitDelivered(1));
  processes[1]->AcceptAll();
  processes[1]->network().Drop(0, "too slow");
  CHECK(processes[1]->WaitLost(0));
  CHECK(processes[1]->why_lost(0) == "too slow");
  const auto cut_off_at = std::chrono::steady_clock::now();
  CHECK(processes[0]->WaitLost(1));
  CHECK(std::chrono::steady_clock::now() - cut_off_at < std::chrono::seconds(15));  // UCX's own keepalive takes 20 s
  CHECK(processes[0]->WaitSent(2));                                                 // with or without success
  for (const int p : {0, 1}) {
    const int64_t unsent = processes[p]->unsent();
    processes[p]->Send(1 - p, 0, 1, 5000);
    CHECK(processes[p]->WaitSent(p == 0 ? 3 : 1) && processes[p]->unsent() == unsent + 1);
    processes[p]->Send(2, 0, 0, 0);
  }
  CHECK(processes[2]->WaitDelivered(2));
  LeaveAll(processes);
}

// Messages of a process of another job are dropped.
inline void CheckToken(const MakeNetwork& make) {
  TestProcess host(0), stranger(1);
  host.Join(make(0, 2, 1, &host));
  stranger.Join(make(1, 2, 2, &stranger));
  CHECK(host.network().Connect(1, stranger.network().address()).ok());
  CHECK(stranger.network().Connect(0, host.network().address()).ok());
  stranger.Send(0, 0, 0, 0);
  stranger.Send(0, 0, 1, 100);
  stranger.Send(0, 0, 2, 100000);
  CHECK(stranger.WaitSent(3));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  while (host.network().rejected() < 3) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(host.delivered() == 0);
  stranger.Leave();
}

}  // namespace jaxcomm
