#include "memory_network.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../../ffi/transport/receive_queue.h"

namespace jaxcomm {

// Payloads that Send copies. Larger ones stay at the sender until they have a destination.
constexpr size_t kCopyBytes = 4096;
constexpr int64_t kLatency_ns = 5'000, kLossDetection_ns = 30'000'000;

class MemoryEndpoint : public Network {
 public:
  MemoryEndpoint(MemoryFabric* fabric, int process, uint64_t token, Receiver* receiver)
      : fabric_(fabric),
        process_(process),
        token_(token),
        receive_queue_(receiver, process, fabric->num_processes_, token),
        peers_(fabric->num_processes_) {}
  ~MemoryEndpoint() override { fabric_->Detach(process_); }

  std::string address() const override { return "memory:" + std::to_string(process_); }

  Status Connect(int process, const std::string& address) override {
    peers_[process].connected = address == "memory:" + std::to_string(process);
    return OkStatus();
  }

  void Send(int process, uint64_t channel, const void* header, size_t header_bytes, const void* data, size_t bytes,
            SentFn sent) override {
    Envelope envelope;
    envelope.channel = channel;
    envelope.header_bytes = static_cast<uint16_t>(header_bytes);
    if (header_bytes > 0) std::memcpy(envelope.header, header, header_bytes);
    Post(process, envelope, data, bytes, std::move(sent));
  }

  void Accept(int process, uint64_t id, void* destination) override {
    std::lock_guard<std::mutex> lock(fabric_->mutex_);
    MemoryFabric* const fabric = fabric_;
    const int self = process_;
    fabric_->At(fabric_->now_ns_, [fabric, self, process, id, destination] {
      if (MemoryEndpoint* endpoint = fabric->endpoints_[self])
        endpoint->receive_queue_.Accept(process, id, destination);
    });
  }

  void Drop(int process, const std::string& why) override {
    std::lock_guard<std::mutex> lock(fabric_->mutex_);
    MemoryFabric* const fabric = fabric_;
    const int self = process_;
    fabric->At(fabric->now_ns_, [fabric, self, process, why] { fabric->Break(self, process, why); });
    fabric->At(fabric->now_ns_ + kLossDetection_ns,
               [fabric, self, process] { fabric->Break(process, self, "the connection was lost"); });
  }

  uint64_t rejected() const override { return receive_queue_.rejected(); }

 private:
  friend class MemoryFabric;
  struct Peer {
    std::atomic<bool> connected{false};
    uint64_t sequence = 0;  // guarded by the fabric's mutex, as below
    uint64_t bytes = 0;     // sent
  };

  void Post(int process, Envelope envelope, const void* data, size_t bytes, SentFn sent);

  MemoryFabric* const fabric_;
  const int process_;
  const uint64_t token_;
  ReceiveQueue receive_queue_;
  std::vector<Peer> peers_;
};

class MemoryPayload : public RemotePayload {
 public:
  MemoryPayload(MemoryFabric* fabric, uint64_t id) : fabric_(fabric), id_(id) {}
  ~MemoryPayload() override {
    if (!fabric_) return;
    std::lock_guard<std::mutex> lock(fabric_->mutex_);
    fabric_->At(fabric_->now_ns_, [fabric = fabric_, id = id_] {
      MemoryFabric::Outstanding message;
      if (fabric->TakeOutstanding(id, &message)) message.sent(true);
    });
  }

  void Fetch(void* destination, std::function<void(bool)> done) override {
    std::exchange(fabric_, nullptr)->Fetch(id_, destination, std::move(done));
  }

 private:
  MemoryFabric* fabric_;
  const uint64_t id_;
};

void MemoryEndpoint::Post(int process, Envelope envelope, const void* data, size_t bytes, SentFn sent) {
  envelope.token = token_;
  envelope.process = process_;
  Peer& peer = peers_[process];
  bool copied = bytes <= kCopyBytes;
  {
    std::lock_guard<std::mutex> lock(fabric_->mutex_);
    MemoryFabric* const fabric = fabric_;
    if (!peer.connected || receive_queue_.lost(process) || fabric->lost_[process_]) {
      copied = false;
    } else {
      envelope.sequence = peer.sequence++;
      peer.bytes += bytes;
      const std::string header(reinterpret_cast<const char*>(&envelope), envelope.size_bytes());
      const int self = process_;
      if (copied) {
        std::string payload(static_cast<const char*>(data), bytes);
        fabric->At(fabric->Transmit(self, process, bytes), [fabric, self, process, header, payload] {
          MemoryEndpoint* const to = fabric->endpoints_[process];
          if (!to || fabric->lost_[process] || fabric->lost_[self]) return;
          to->receive_queue_.Arrive(header.data(), header.size(), payload.size(), payload.data(), nullptr);
        });
      } else {
        const uint64_t id = fabric->next_outstanding_++;
        fabric->outstanding_[id] = {self, process, data, bytes, sent ? std::move(sent) : [](bool) {}};
        fabric->At(fabric->Transmit(self, process, 0), [fabric, self, process, header, bytes, id] {
          MemoryEndpoint* const to = fabric->endpoints_[process];
          if (!to || fabric->lost_[process] || fabric->lost_[self]) return;
          to->receive_queue_.Arrive(header.data(), header.size(), bytes, nullptr,
                                    std::make_unique<MemoryPayload>(fabric, id));
        });
        return;
      }
    }
  }
  if (sent) sent(copied);
}

MemoryFabric::MemoryFabric(int num_processes, const MemoryNetworkOptions& options)
    : num_processes_(num_processes),
      options_(options),
      random_(options.seed),
      link_free_ns_(static_cast<size_t>(num_processes) * num_processes),
      lost_(num_processes),
      endpoints_(num_processes) {}

MemoryFabric::~MemoryFabric() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::unique_ptr<Network> MemoryFabric::Attach(int process, uint64_t token, Receiver* receiver) {
  auto endpoint = std::make_unique<MemoryEndpoint>(this, process, token, receiver);
  std::lock_guard<std::mutex> stepping(stepping_);
  std::lock_guard<std::mutex> lock(mutex_);
  endpoints_[process] = endpoint.get();
  lost_[process] = false;
  return endpoint;
}

// The last message of a process to each peer, and the end of its sends.
void MemoryFabric::Detach(int process) {
  MemoryEndpoint* const endpoint = endpoints_[process];
  if (!lost_[process]) {
    Envelope disconnect;
    disconnect.kind = Envelope::kDisconnect;
    for (int peer = 0; peer < num_processes_; ++peer) {
      if (endpoint->peers_[peer].connected) endpoint->Post(peer, disconnect, nullptr, 0, nullptr);
    }
  }
  std::lock_guard<std::mutex> stepping(stepping_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    endpoints_[process] = nullptr;
  }
  FailOutstanding([process](const Outstanding& message) { return message.from == process || message.to == process; });
}

bool MemoryFabric::Step(int64_t before_ns) {
  std::lock_guard<std::mutex> stepping(stepping_);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto first = events_.begin();
  if (first == events_.end() || first->first.first >= before_ns) return false;
  now_ns_ = first->first.first;
  const std::function<void()> event = std::move(first->second);
  events_.erase(first);
  lock.unlock();
  event();
  return true;
}

void MemoryFabric::Start() {
  thread_ = std::thread([this] {
    for (;;) {
      while (Step()) {
      }
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !events_.empty(); });
      if (stop_) return;
    }
  });
}

uint64_t MemoryFabric::bytes_sent(int from, int to) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return endpoints_[from]->peers_[to].bytes;
}

void MemoryFabric::Lose(int process) {
  std::lock_guard<std::mutex> stepping(stepping_);
  std::lock_guard<std::mutex> lock(mutex_);
  lost_[process] = true;
  At(now_ns_ + kLossDetection_ns, [this, process] {
    for (int peer = 0; peer < num_processes_; ++peer) {
      if (peer != process) Break(peer, process, "the connection was lost");
    }
  });
}

void MemoryFabric::At(int64_t time_ns, std::function<void()> event) {
  events_.emplace(EventId(time_ns, num_events_++), std::move(event));
  changed_.notify_one();
}

int64_t MemoryFabric::Transmit(int from, int to, size_t bytes) {
  int64_t& free_ns = link_free_ns_[static_cast<size_t>(from) * num_processes_ + to];
  free_ns = std::max(free_ns, now_ns_) + static_cast<int64_t>(static_cast<double>(bytes) / options_.bytes_per_ns);
  const int64_t jitter_ns =
      options_.jitter_ns > 0 ? static_cast<int64_t>(random_() % static_cast<uint64_t>(options_.jitter_ns + 1)) : 0;
  return free_ns + kLatency_ns + jitter_ns;
}

bool MemoryFabric::TakeOutstanding(uint64_t id, Outstanding* message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = outstanding_.find(id);
  if (it == outstanding_.end()) return false;
  *message = std::move(it->second);
  outstanding_.erase(it);
  return true;
}

void MemoryFabric::FailOutstanding(const std::function<bool(const Outstanding&)>& which) {
  std::vector<SentFn> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = outstanding_.begin(); it != outstanding_.end();) {
      if (which(it->second)) {
        failed.push_back(std::move(it->second.sent));
        it = outstanding_.erase(it);
      } else {
        ++it;
      }
    }
  }
  for (const SentFn& sent : failed) sent(false);
}

void MemoryFabric::Fetch(uint64_t id, void* destination, std::function<void(bool)> done) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = outstanding_.find(id);
  if (it == outstanding_.end()) return At(now_ns_, [done] { done(false); });
  const int from = it->second.from;
  const int to = it->second.to;
  // Half a round trip for the request.
  const int64_t arrival_ns = Transmit(from, to, it->second.bytes) + kLatency_ns;
  const EventId arrival(arrival_ns, num_events_);
  under_way_[arrival] = {from, to, done};
  At(arrival_ns, [this, id, from, to, destination, done, arrival] {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      under_way_.erase(arrival);
    }
    if (!endpoints_[to]) return;  // the receive queue that owns `done` has been destroyed
    Outstanding message;
    const bool ok = !lost_[from] && !lost_[to] && TakeOutstanding(id, &message);
    if (ok) {
      std::memcpy(destination, message.data, message.bytes);
      message.sent(true);
    }
    done(ok);
  });
}

// The process has no connection to the peer any more: its sends and fetches end.
void MemoryFabric::Break(int process, int peer, const std::string& why) {
  FailOutstanding([=](const auto& message) { return message.from == process && message.to == peer; });
  MemoryEndpoint* const endpoint = endpoints_[process];
  if (!endpoint) return;
  endpoint->receive_queue_.Lose(peer, why);
  std::vector<std::function<void(bool)>> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = under_way_.begin(); it != under_way_.end();) {
      const bool ends = it->second.from == peer && it->second.to == process;
      if (ends) {
        events_.erase(it->first);
        ended.push_back(std::move(it->second.done));
      }
      it = ends ? under_way_.erase(it) : std::next(it);
    }
  }
  for (const auto& done : ended) done(false);
}

}  // namespace jaxcomm
