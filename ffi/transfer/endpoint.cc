#include "transfer/endpoint.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/duration.h"

namespace jaxcomm {
namespace {

constexpr std::chrono::milliseconds kTimer{50};  // leases and limits of the handshake are checked as often
// A waiting thread polls as long after the latest bytes before it sleeps: an answer of an endpoint of the same host
// takes as long, and a sleeping thread is woken by another one, which has been woken itself. So does the thread of a
// source that waits for a slot.
constexpr std::chrono::microseconds kPollLimit{100};

bool Polls() {
  static const bool polls = std::thread::hardware_concurrency() > 1;
  return polls;
}

}  // namespace

StatusOr<std::shared_ptr<Endpoint>> Endpoint::Start(const TcpNetwork::Options& options, int64_t max_lease_ms) {
  std::shared_ptr<Endpoint> endpoint(new Endpoint(max_lease_ms));
  StatusOr<std::unique_ptr<TcpNetwork>> network = TcpNetwork::Listen(options, endpoint.get());
  JAXCOMM_RETURN_IF_ERROR(network.status());
  endpoint->network_ = *std::move(network);
  endpoint->source_.SetNetwork(endpoint->network_.get());
  endpoint->reader_.SetNetwork(endpoint->network_.get());
  endpoint->thread_ = std::thread([raw = endpoint.get()] { raw->Run(); });
  return endpoint;
}

Endpoint::~Endpoint() { Stop(); }

void Endpoint::Stop() {
  {
    const std::unique_lock<std::mutex> lock = Lock();
    if (ending_ || !thread_.joinable()) return;
    ending_ = true;
  }
  network_->Wake();
  thread_.join();
  {
    const std::unique_lock<std::mutex> lock = Lock();
    stopped_ = true;
    reader_.EndAll({Code::kCancelled, "the endpoint was closed"});
    network_->Close("the endpoint was closed");
  }
  Notify();
  RunDue();
}

void Endpoint::Run() {
  // While data keep coming, this thread would take the mutex again before a thread that waits for it has woken up.
  TcpNetwork::Events events;
  while (Advance(events)) {
    for (const uint64_t locked = num_locked_; num_locking_ > 0 && num_locked_ == locked;) std::this_thread::yield();
    events = NextEvents();
  }
}

TcpNetwork::Events Endpoint::NextEvents() {
  const auto until = std::chrono::steady_clock::now() + kPollLimit;
  while (waits_for_slot_ && Polls() && std::chrono::steady_clock::now() < until) {
    TcpNetwork::Events events = network_->Wait(0);
    if (!events.empty()) return events;
    std::this_thread::yield();
  }
  return network_->Wait(kTimer.count());
}

std::unique_lock<std::mutex> Endpoint::Lock() {
  ++num_locking_;
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_locked_;
  --num_locking_;
  return lock;
}

void Endpoint::Notify() {
  {
    const std::lock_guard<std::mutex> lock(done_mutex_);
  }
  done_.notify_all();
}

bool Endpoint::Advance(const TcpNetwork::Events& events) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ending_) return false;
    network_->Progress(events);
    waits_for_slot_ = network_->waits_for_slot();
    const auto now = std::chrono::steady_clock::now();
    source_.OnTime(now);
    reader_.OnTime(now);
  }
  Notify();
  RunDue();
  return true;
}

void Endpoint::RunDue() {
  std::vector<std::shared_ptr<Call>> due;
  {
    const std::unique_lock<std::mutex> lock = Lock();
    due = reader_.TakeDue();
  }
  for (const std::shared_ptr<Call>& call : due) {
    for (const auto& then : call->then) then(*call);
    call->then.clear();
  }
}

void Endpoint::OnPeer(int peer, bool client) {
  if (client) reader_.OnPeer(peer);
}

char* Endpoint::OnBulk(int peer, const Frame& frame) { return reader_.OnBulk(peer, frame); }

void Endpoint::OnFrame(int peer, const Frame& frame, const char* payload) {
  if (reader_.Has(peer)) {
    reader_.OnFrame(peer, frame, payload);
  } else {
    source_.OnFrame(peer, frame, Decoder(payload, frame.bytes));
  }
}

void Endpoint::OnRoom(int peer) { source_.OnRoom(peer); }

void Endpoint::OnLost(int peer, const std::string& why) {
  source_.OnLost(peer);
  reader_.OnLost(peer, why);
}

Error Endpoint::Expose(Exposure exposure, uint64_t* id) {
  const std::unique_lock<std::mutex> lock = Lock();
  return source_.Expose(std::move(exposure), id);
}

void Endpoint::Withdraw(uint64_t id, bool revoke) {
  const std::unique_lock<std::mutex> lock = Lock();
  source_.Withdraw(id, revoke);
  network_->Wake();
}

bool Endpoint::InUse(uint64_t id) {
  const std::unique_lock<std::mutex> lock = Lock();
  return !stopped_ && source_.InUse(id);
}

void Endpoint::MarkReady(uint64_t id, uint32_t array) {
  const std::unique_lock<std::mutex> lock = Lock();
  source_.MarkReady(id, array);
  network_->Wake();
}

StatusOr<int> Endpoint::Connect(const std::string& address) {
  const std::unique_lock<std::mutex> lock = Lock();
  if (ending_) return UnavailableError("the endpoint was closed");
  StatusOr<int> peer = network_->Connect(address);
  if (peer.ok()) reader_.Add(*peer);
  return peer;
}

void Endpoint::Disconnect(int peer) {
  const std::unique_lock<std::mutex> lock = Lock();
  network_->Drop(peer, "this endpoint closed the connection");
  reader_.Forget(peer);
}

std::shared_ptr<Call> Endpoint::Open(int peer, const std::string& key, int64_t version, int64_t lease_ms) {
  const std::unique_lock<std::mutex> lock = Lock();
  return reader_.Open(peer, key, version, lease_ms);
}

std::shared_ptr<Call> Endpoint::OpenAndRead(int peer, const std::string& key, int64_t version, int64_t lease_ms,
                                            const std::string& digest, bool closes, const std::vector<Piece>& from,
                                            std::vector<Piece> to, std::vector<StridedArray> arrays) {
  const std::unique_lock<std::mutex> lock = Lock();
  return reader_.OpenAndRead(peer, key, version, lease_ms, digest, closes, from, std::move(to), std::move(arrays));
}

std::shared_ptr<Call> Endpoint::Watch(int peer, const std::string& key, int64_t after) {
  const std::unique_lock<std::mutex> lock = Lock();
  return reader_.Watch(peer, key, after);
}

std::vector<std::shared_ptr<Call>> Endpoint::Read(std::vector<std::vector<ReadSource>> reads,
                                                  const std::vector<StridedArray>& arrays) {
  const std::unique_lock<std::mutex> lock = Lock();
  std::vector<std::shared_ptr<Call>> calls;
  for (std::vector<ReadSource>& sources : reads) calls.push_back(reader_.Read(std::move(sources), arrays));
  return calls;
}

void Endpoint::Cancel(const std::shared_ptr<Call>& call, const Error& why) {
  {
    const std::unique_lock<std::mutex> lock = Lock();
    reader_.Cancel(call, why);
    network_->Wake();  // for RunDue
  }
  Notify();
}

void Endpoint::Close(int peer, uint64_t lease) {
  const std::unique_lock<std::mutex> lock = Lock();
  reader_.Close(peer, lease);
}

bool Endpoint::Wait(const std::shared_ptr<Call>& call, double limit_s) {
  const std::chrono::duration<double> limit(limit_s);
  const auto began = std::chrono::steady_clock::now();
  if (Polls()) Poll(call, limit);
  std::unique_lock<std::mutex> lock(done_mutex_);
  // ThreadSanitizer knows waits on the system clock only. A jump of that clock does not matter: Advance ends each wait.
  for (auto now = began; !call->done && now - began < limit; now = std::chrono::steady_clock::now()) {
    const auto rest = std::min<std::chrono::duration<double>>(limit - (now - began), kTimer);
    done_.wait_until(lock, std::chrono::system_clock::now() + DurationOf(rest.count()));
  }
  return call->done;
}

void Endpoint::Poll(const std::shared_ptr<Call>& call, std::chrono::duration<double> limit) {
  const auto began = std::chrono::steady_clock::now();
  auto latest = began;
  TcpNetwork::Events events;
  int64_t received_bytes = 0;
  int peer = -1;  // a read may go on at another one
  {
    const std::unique_lock<std::mutex> lock = Lock();
    if (call->done) return;
    peer = call->peer;
    events = network_->Poll(peer);
    if (events.empty()) return;
    network_->SetPolled(peer, true);
    received_bytes = call->received_bytes;
  }
  try {
    for (auto now = began; now - latest < kPollLimit && now - began < limit; now = std::chrono::steady_clock::now()) {
      if (!Advance(events)) return;
      {
        const std::unique_lock<std::mutex> lock = Lock();
        if (call->done) break;
        if (std::exchange(received_bytes, call->received_bytes) != call->received_bytes) latest = now;
      }
      std::this_thread::yield();  // the other endpoint may want this processor
    }
  } catch (...) {  // without memory. A frame may be lost
    const std::unique_lock<std::mutex> lock = Lock();
    network_->Drop(peer, "out of memory");
    throw;
  }
  const std::unique_lock<std::mutex> lock = Lock();
  network_->SetPolled(peer, false);
}

Error Endpoint::ErrorOf(const std::shared_ptr<Call>& call) {
  const std::unique_lock<std::mutex> lock = Lock();
  return call->error;
}

std::pair<int64_t, int64_t> Endpoint::Progress(const std::shared_ptr<Call>& call) {
  const std::unique_lock<std::mutex> lock = Lock();
  return {call->received_bytes, call->total_bytes};
}

void Endpoint::Then(const std::shared_ptr<Call>& call, std::chrono::steady_clock::time_point deadline,
                    std::function<void(const Call&)> then) {
  {
    const std::unique_lock<std::mutex> lock = Lock();
    if (!call->done) {
      call->deadline = std::min(call->deadline, deadline);
      return call->then.push_back(std::move(then));
    }
  }
  then(*call);
}

EndpointStats Endpoint::stats() {
  const std::unique_lock<std::mutex> lock = Lock();
  EndpointStats stats{network_->traffic(), network_->rejected(), source_.counters(), source_.num_leases(), {},
                      reader_.opens(),     reader_.reads(),      reader_.stages()};
  for (int code = 0; code <= static_cast<int>(Code::kCancelled); ++code) {
    stats.failures.push_back(reader_.failures(static_cast<Code>(code)));
  }
  return stats;
}

std::vector<WaitingCall> Endpoint::Waiting() {
  const std::unique_lock<std::mutex> lock = Lock();
  return reader_.Waiting();
}

}  // namespace jaxcomm
