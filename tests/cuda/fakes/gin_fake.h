// A fake of the part of NCCL's GIN that gin_network.cuh uses, under the same names. Its network guarantees no more than
// GIN does. A put's source is read late and in parts, and the put arrives later still, in any order. A strong signal
// arrives after the earlier puts to the same rank on the same context. A counter
// shows that the source has been read, and that the entries in front of the put have left the queue, nothing else. Each
// context has its own signals and counters, and a queue to each other rank. The fake checks that the queues do not
// overflow, where NCCL's would wait without a deadline. It also checks that puts and signals are released for a scope
// beyond the GPU, because the network is not part of the GPU.
//
// The network runs in thread blocks of its own. ThreadSanitizer sees its accesses as those of other threads, ordered
// only by posting, signals and counters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/program/gin_args.h"
#include "../../check.h"
#include "emulation.h"
#include "gin_names.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace gin_fake {

// Protects the fake's internal state. ThreadSanitizer must not take it for synchronisation between users.
struct Unchecked {
#if defined(__SANITIZE_THREAD__)
  Unchecked() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unchecked() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unchecked() {}
#endif
  Unchecked(const Unchecked&) = delete;
};

inline void Release([[maybe_unused]] void* token) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(token);
#endif
}

inline void Acquire([[maybe_unused]] void* token) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(token);
#endif
}

struct Message {
  enum Kind { kPut, kStrongSignal } kind = kPut;
  uint32_t id = 0;  // id of a put's counter, or of the signal
  const char* src = nullptr;
  char* dst = nullptr;
  size_t bytes = 0;

  std::vector<char> data;
  bool busy = false;  // a network thread is working on it
  bool read = false, counted = false, arrived = false;
  bool passed = false;  // a signal in front of a put that has been counted

  // Whether it takes an entry of the queue.
  bool queued() const { return kind == kPut ? !counted : !arrived && !passed; }
  bool done() const { return arrived && (kind != kPut || counted); }
};

class Network {
 public:
  struct Link {
    int context, from, to;
    bool operator<(const Link& other) const {
      return std::tie(context, from, to) < std::tie(other.context, other.from, other.to);
    }
  };

  Network(int num_ranks, int num_channels, uint64_t seed)
      : num_contexts_(1 + static_cast<int>(seed % 3)),
        num_signals_(jaxcomm::cuda::NumGinSignals(num_channels, num_ranks)),
        num_counters_(jaxcomm::cuda::NumGinCounters(num_channels)),
        depth_((num_channels + num_contexts_ - 1) / num_contexts_ * jaxcomm::device::kMostEntries),
        random_(seed),
        lazy_(random_() % 2 == 0) {}

  void Post(Link link, Message message) {
    const Unchecked unchecked;
    CHECK(link.context >= 0 && link.context < num_contexts_ && link.from != link.to);
    CHECK(message.id < (message.kind == Message::kPut ? num_counters_ : num_signals_));
    Queue& queue = queues_[link];
    int64_t entries = 1, of_counters = message.kind == Message::kPut ? 2 : 0;
    for (const auto& before : queue.messages) {
      if (!before->queued()) continue;
      ++entries;
      if (before->kind == Message::kPut) of_counters += 2;
    }
    CHECK(entries <= depth_ && of_counters <= depth_);
    if (message.kind == Message::kPut) {
      Sent& sent = sent_[{link.from, link.to}];
      ++sent.puts;
      sent.bytes += static_cast<int64_t>(message.bytes);
    }
    queue.messages.push_back(std::make_unique<Message>(std::move(message)));
    Release(queue.messages.back().get());
  }

  uint64_t ReadSignal(int context, int rank, uint32_t id) { return Read({true, context, rank, id}); }
  uint64_t ReadCounter(int context, int rank, uint32_t id) { return Read({false, context, rank, id}); }

  ncclDevComm CommOf(int rank);

  // Runs `body` in thread blocks of all ranks, by blockIdx.y, and the network in others.
  void Launch(unsigned blocks, unsigned ranks, unsigned threads, uint64_t seed, const std::function<void()>& body,
              size_t shared_bytes = 0) {
    Reopen();
    const auto run = [&] {
      if (blockIdx.y == ranks) return Serve();
      body();
      Leave();
    };
    emulation::Launch(blocks, ranks + 1, threads, seed, run, shared_bytes);
  }

  // Called by all threads of the last row of a launch, and Leave by the others when they have ended.
  void Serve() {
    const unsigned num_users = (gridDim.y - 1) * gridDim.x * blockDim.x;
    while (threadIdx.x < 2 && num_left() < num_users) {
      const Action action = Next();
      if (action.message != nullptr) CarryOut(action);
      emulation::Pause();
    }
  }
  void Leave() {
    const Unchecked unchecked;
    ++num_left_;
  }
  void Reopen() { num_left_ = 0; }

  // From now on, the network moves nothing.
  void Stall() { stalled_ = true; }

  // Messages of a link that are not done.
  size_t num_posted(Link link) { return queues_[link].messages.size(); }

  // All puts from a rank to another one until now.
  struct Sent {
    int64_t puts = 0, bytes = 0;
  };
  Sent sent(int from, int to) { return sent_[{from, to}]; }

  bool empty() const {
    return std::all_of(queues_.begin(), queues_.end(), [](const auto& entry) { return entry.second.messages.empty(); });
  }

 private:
  using Word = std::tuple<bool, int, int, uint32_t>;  // whether a signal (else a counter); context; owner; id
  struct Queue {
    std::deque<std::unique_ptr<Message>> messages;  // in the order of posting
    char arrivals = 0;                              // orders arrivals before strong signals
  };
  struct Action {
    Link link;
    Queue* queue = nullptr;
    Message* message = nullptr;
    enum What { kRead, kCount, kArrive } what = kRead;
  };

  unsigned num_left() const {
    const Unchecked unchecked;
    return num_left_;
  }

  uint64_t Read(Word word) {
    uint64_t* value;
    {
      const Unchecked unchecked;
      CHECK(std::get<3>(word) < (std::get<0>(word) ? num_signals_ : num_counters_));
      wanted_.insert(word);
      value = &words_[word];
    }
    return __atomic_load_n(value, __ATOMIC_ACQUIRE);
  }

  void Increase(Word word) {
    uint64_t* value;
    {
      const Unchecked unchecked;
      wanted_.erase(word);
      value = &words_[word];
    }
    __atomic_fetch_add(value, 1, __ATOMIC_ACQ_REL);
  }

  // A lazy network carries out only operations whose effect a thread polls for.
  bool Wanted(Word word) const { return !lazy_ || wanted_.count(word) > 0; }

  Action Next() {
    const Unchecked unchecked;
    std::vector<Action> possible;
    for (auto& [link, queue] : queues_) {
      // A wanted signal makes all puts before it wanted.
      size_t reach = lazy_ ? 0 : queue.messages.size();
      for (size_t i = reach; i < queue.messages.size(); ++i) {
        const Message& message = *queue.messages[i];
        if (message.kind != Message::kPut && Wanted({true, link.context, link.to, message.id})) reach = i + 1;
      }
      bool open = false;  // a put that has not arrived
      for (size_t i = 0; i < queue.messages.size(); ++i) {
        Message& message = *queue.messages[i];
        const bool put = message.kind == Message::kPut;
        const bool arrives = i < reach && !message.arrived && (put || !open);
        const bool counts = put && (i < reach || Wanted({false, link.context, link.from, message.id}));
        const auto may = [&](bool allowed, Action::What what) {
          if (allowed && !message.busy) possible.push_back({link, &queue, &message, what});
        };
        may(put && !message.read && counts, Action::kRead);
        may(put && message.read && !message.counted && counts, Action::kCount);
        may(arrives && (!put || message.read), Action::kArrive);
        open = open || (put && !message.arrived);
      }
    }
    if (possible.empty() || stalled_) return {};
    const Action action = possible[random_() % possible.size()];
    action.message->busy = true;
    return action;
  }

  void CarryOut(const Action& action) {
    Message& message = *action.message;
    const auto& [context, from, to] = action.link;
    Acquire(&message);
    if (action.what == Action::kRead) {
      {
        const Unchecked unchecked;
        message.data.resize(message.bytes);
      }
      Copy(message.data.data(), message.src, message.bytes);
    } else if (action.what == Action::kCount) {
      Increase({false, context, from, message.id});
    } else if (message.kind == Message::kPut) {
      Copy(message.dst, message.data.data(), message.bytes);
      Release(&action.queue->arrivals);
    } else {
      Acquire(&action.queue->arrivals);
      Increase({true, context, to, message.id});
    }
    Release(&message);
    const Unchecked unchecked;
    message.busy = false;
    message.read = message.read || action.what == Action::kRead;
    message.counted = message.counted || action.what == Action::kCount;
    message.arrived = message.arrived || action.what == Action::kArrive;
    auto& messages = action.queue->messages;
    for (size_t i = 0; action.what == Action::kCount && messages[i].get() != &message; ++i) messages[i]->passed = true;
    if (message.done()) {
      messages.erase(
          std::find_if(messages.begin(), messages.end(), [&](const auto& m) { return m.get() == &message; }));
    }
  }

  // Other fibers run in between.
  static void Copy(char* dst, const char* src, size_t bytes) {
    std::memcpy(dst, src, bytes / 2);
    emulation::Pause();
    std::memcpy(dst + bytes / 2, src + bytes / 2, bytes - bytes / 2);
  }

  const int num_contexts_;
  const uint32_t num_signals_, num_counters_;
  const int64_t depth_;  // of a queue, and of the one for counters
  std::mt19937_64 random_;
  const bool lazy_;
  bool stalled_ = false;
  unsigned num_left_ = 0;
  std::map<Link, Queue> queues_;
  std::map<Word, uint64_t> words_;
  std::map<std::pair<int, int>, Sent> sent_;
  std::set<Word> wanted_;  // polled since their last increment
};

}  // namespace gin_fake

// The names from here on are NCCL's.
struct ncclDevComm {
  int rank = 0;
  uint32_t ginContextCount = 0;
  gin_fake::Network* network = nullptr;
};
inline ncclDevComm gin_fake::Network::CommOf(int rank) { return {rank, static_cast<uint32_t>(num_contexts_), this}; }

class ncclGin {
 public:
  ncclGin(const ncclDevComm& comm, int context) : comm_(comm), context_(context) {}

  void put(ncclTeam, int peer, ncclWindow_t to, size_t to_offset, ncclWindow_t from, size_t from_offset, size_t bytes,
           ncclGin_None, ncclGin_WeakCounterInc action, ncclCoopThread = {}, ncclGin_None = {},
           cuda::thread_scope given = cuda::thread_scope_thread,
           cuda::thread_scope required = cuda::thread_scope_device) const {
    CHECK(given == cuda::thread_scope_thread && required == cuda::thread_scope_system);
    gin_fake::Message message;
    message.id = action.counter;
    message.src = from->base + comm_.rank * from->stride + from_offset;
    message.dst = to->base + peer * to->stride + to_offset;
    message.bytes = bytes;
    comm_.network->Post({context_, comm_.rank, peer}, std::move(message));
  }

  void signal(ncclTeam, int peer, ncclGin_StrongSignalInc action, ncclCoopThread = {}, ncclGin_None = {},
              cuda::thread_scope given = cuda::thread_scope_thread,
              cuda::thread_scope required = cuda::thread_scope_device) const {
    CHECK(given == cuda::thread_scope_thread && required == cuda::thread_scope_system);
    gin_fake::Message message;
    message.kind = gin_fake::Message::kStrongSignal;
    message.id = action.signal;
    comm_.network->Post({context_, comm_.rank, peer}, std::move(message));
  }

  uint64_t readSignal(ncclGinSignal_t signal) const { return comm_.network->ReadSignal(context_, comm_.rank, signal); }
  uint64_t readCounter(ncclGinCounter_t counter) const {
    return comm_.network->ReadCounter(context_, comm_.rank, counter);
  }

 private:
  const ncclDevComm& comm_;
  const int context_;
};
