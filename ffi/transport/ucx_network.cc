#include "transport/ucx_network.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/duration.h"
#include "transport/receive_queue.h"
#include "transport/ucx_library.h"
#include "transport/ucx_worker.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kCopyBytes = 1024;                        // payloads that Send copies
constexpr auto kSleep = std::chrono::seconds(1);           // longest sleep, because UCX has timers of its own
constexpr auto kPoll = std::chrono::milliseconds(1);       // while it waits for peers at the end
constexpr auto kClosing = std::chrono::milliseconds(500);  // time for UCX to end its requests

class UcxNetwork : public Network {
 public:
  UcxNetwork(const UcxOptions& options, int process, int num_processes, uint64_t token, Receiver* receiver)
      : options_(options),
        eager_bytes_(options.eager_bytes > 0 ? options.eager_bytes : (HasRdma() ? 64 << 10 : kEagerBytes)),
        process_(process),
        token_(token),
        receive_queue_(receiver, process, num_processes, token),
        peers_(num_processes) {}
  ~UcxNetwork() override;

  Status Open();

  std::string address() const override { return ucx_worker_->address(); }
  Status Connect(int process, const std::string& address) override;
  void Send(int process, uint64_t channel, const void* header, size_t header_bytes, const void* data, size_t bytes,
            SentFn sent) override;
  void Accept(int process, uint64_t id, void* destination) override;
  void Drop(int process, const std::string& why) override;
  uint64_t rejected() const override { return receive_queue_.rejected(); }

 private:
  // A Send. Lives until UCX no longer needs header and data.
  struct Outgoing {
    UcxNetwork* network = nullptr;
    int process = -1;
    Envelope envelope;
    const void* data = nullptr;
    size_t bytes = 0;
    std::unique_ptr<char[]> copy;
    SentFn sent;
  };
  struct Fetch {
    UcxNetwork* network = nullptr;
    std::function<void(bool)> done;
  };
  class Payload;
  struct Peer {
    UcxNetwork* network = nullptr;
    ucp::Endpoint endpoint = nullptr;
    uint64_t sequence = 0;          // of the next message
    ucp::Status status = ucp::kOk;  // an error for HandleErrors()
    std::string why;                // replaces UCX's text of the error; may be empty
    bool disconnecting = false;
    std::atomic<bool> connected{false};
    std::atomic<bool> failed{false};
  };

  void Do(std::function<void()> task);
  void Wake();

  // For the progress thread.
  void Run();
  bool RunQueue();
  void ReleaseUnwanted();
  bool HandleErrors();
  void Sleep();
  void Post(std::unique_ptr<Outgoing> message);
  void Finish(Outgoing* message, ucp::Status status);
  void PostControl(int process, Envelope::Kind kind);
  void Close();
  template <typename Done>
  void ProgressUntil(Clock::duration limit, Done done);

  static ucp::Status OnActiveMessage(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                                     const ucp::ReceivedParams* params);
  static void OnEndpointError(void* arg, ucp::Endpoint endpoint, ucp::Status status);
  static void OnSent(void* request, ucp::Status status, void* user_data);
  static void OnFetched(void* request, ucp::Status status, size_t bytes, void* user_data);

  const UcxOptions options_;
  const size_t eager_bytes_;
  const int process_;
  const uint64_t token_;
  std::unique_ptr<UcxWorker> ucx_worker_;
  const UcxLibrary* ucx_ = nullptr;  // of the worker
  ucp::Worker worker_ = nullptr;
  int wake_fd_ = -1;
  std::thread thread_;

  std::mutex mutex_;  // guards the two queues
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::vector<std::function<void()>> tasks_;
  std::atomic<bool> queued_{false};
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stop_{false};

  // For the progress thread.
  std::vector<void*> unwanted_;  // descriptors of dropped payloads, to be released outside of UCX's callbacks
  ReceiveQueue receive_queue_;
  std::vector<Peer> peers_;
  bool closing_ = false;
  bool has_errors_ = false;
  std::unordered_set<Outgoing*> sends_;
  std::unordered_set<Fetch*> fetches_;
};

// A payload that UCX has announced by its rendezvous protocol.
class UcxNetwork::Payload : public RemotePayload {
 public:
  Payload(UcxNetwork* network, void* descriptor, size_t bytes)
      : network_(network), descriptor_(descriptor), bytes_(bytes) {}
  ~Payload() override {
    if (descriptor_) network_->unwanted_.push_back(descriptor_);
  }

  void Fetch(void* destination, std::function<void(bool)> done) override {
    UcxNetwork* const network = network_;
    auto* fetch = new UcxNetwork::Fetch{network, std::move(done)};
    network->fetches_.insert(fetch);
    ucp::RequestParams params;
    params.mask = ucp::RequestParams::kCallback | ucp::RequestParams::kUserData;
    params.received = OnFetched;
    params.user_data = fetch;
    void* const request = network->ucx_->ucp_am_recv_data_nbx(network->worker_, std::exchange(descriptor_, nullptr),
                                                              destination, bytes_, &params);
    if (!request) return OnFetched(nullptr, ucp::kOk, bytes_, fetch);
    if (ucp::IsError(request)) return OnFetched(nullptr, ucp::ErrorOf(request), 0, fetch);
  }

 private:
  UcxNetwork* const network_;
  void* descriptor_;
  const size_t bytes_;
};

Status UcxNetwork::Open() {
  ucx_worker_ = std::make_unique<UcxWorker>(process_, static_cast<int>(peers_.size()));
  JAXCOMM_RETURN_IF_ERROR(ucx_worker_->Open(options_, OnActiveMessage, this));
  ucx_ = &ucx_worker_->library();
  worker_ = ucx_worker_->handle();
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return ErrnoToStatus("eventfd");
  for (Peer& peer : peers_) peer.network = this;
  thread_ = std::thread([this] { Run(); });
  return OkStatus();
}

UcxNetwork::~UcxNetwork() {
  if (thread_.joinable()) {
    stop_ = true;
    Wake();
    thread_.join();
  }
  if (worker_) ReleaseUnwanted();
  ucx_worker_.reset();
  if (wake_fd_ >= 0) close(wake_fd_);
  for (Fetch* fetch : fetches_) delete fetch;
  for (Outgoing* message : std::exchange(sends_, {})) {
    if (message->sent) message->sent(false);
    delete message;
  }
}

Status UcxNetwork::Connect(int process, const std::string& address) {
  const StatusOr<const ucp::Address*> worker_address = ucx_worker_->AddressOf(process, address);
  JAXCOMM_RETURN_IF_ERROR(worker_address.status());
  Peer& peer = peers_[process];
  if (peer.connected) return OkStatus();
  std::promise<ucp::Status> created;
  Do([&] {
    ucp::EndpointParams params;
    params.mask = ucp::EndpointParams::kAddress | ucp::EndpointParams::kErrorMode | ucp::EndpointParams::kErrorHandler;
    params.address = *worker_address;
    params.error_mode = ucp::EndpointParams::kReportPeers;
    params.on_error = OnEndpointError;
    params.on_error_arg = &peer;
    created.set_value(ucx_->ucp_ep_create(worker_, &params, &peer.endpoint));
  });
  const ucp::Status status = created.get_future().get();
  if (status != ucp::kOk)
    return ucx_worker_->StatusError("cannot connect to process " + std::to_string(process), status);
  peer.connected = true;
  return OkStatus();
}

void UcxNetwork::Send(int process, uint64_t channel, const void* header, size_t header_bytes, const void* data,
                      size_t bytes, SentFn sent) {
  Peer& peer = peers_[process];
  if (!peer.connected || peer.failed || receive_queue_.lost(process)) {
    if (sent) sent(false);
    return;
  }
  auto message = std::make_unique<Outgoing>();
  message->network = this;
  message->process = process;
  message->envelope.channel = channel;
  message->envelope.header_bytes = static_cast<uint16_t>(header_bytes);
  if (header_bytes > 0) std::memcpy(message->envelope.header, header, header_bytes);
  message->data = data;
  message->bytes = bytes;
  const bool copy = bytes <= kCopyBytes;
  if (!copy) {
    message->sent = std::move(sent);
  } else if (bytes > 0) {
    message->copy.reset(new char[bytes]);
    std::memcpy(message->copy.get(), data, bytes);
    message->data = message->copy.get();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    outgoing_.push_back(std::move(message));
    queued_ = true;
  }
  Wake();
  if (copy && sent) sent(true);
}

void UcxNetwork::Accept(int process, uint64_t id, void* destination) {
  Do([this, process, id, destination] { receive_queue_.Accept(process, id, destination); });
}

void UcxNetwork::Drop(int process, const std::string& why) {
  Do([this, process, why] {
    Peer& peer = peers_[process];
    // Closing this endpoint does not close the peer's, so the peer gets a message. If its socket is full because it is
    // stopped, the message is lost, and its own time limit ends its calls.
    PostControl(process, Envelope::kDisconnect);
    peer.why = why;
    OnEndpointError(&peer, peer.endpoint, ucp::kCanceled);
  });
}

void UcxNetwork::Do(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    queued_ = true;
  }
  Wake();
}

// The progress thread checks its queues once more after it has set `sleeping_`, so it does not miss an item.
void UcxNetwork::Wake() {
  if (!sleeping_.exchange(false)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void UcxNetwork::Run() {
  const auto spin = std::chrono::microseconds(options_.spin_us);
  Clock::time_point last_work = Clock::now();
  while (!stop_) {
    bool worked = RunQueue();
    worked |= ucx_->ucp_worker_progress(worker_) != 0;
    worked |= HandleErrors();
    const Clock::time_point now = Clock::now();
    if (worked) {
      last_work = now;
    } else if (now - last_work >= spin) {
      Sleep();
      last_work = Clock::now();
    } else {
      std::this_thread::yield();  // a peer may need this processor
    }
  }
  Close();
}

bool UcxNetwork::RunQueue() {
  ReleaseUnwanted();
  if (!queued_) return false;
  std::vector<std::unique_ptr<Outgoing>> outgoing;
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    outgoing.swap(outgoing_);
    tasks.swap(tasks_);
    queued_ = false;
  }
  for (const auto& task : tasks) task();
  for (auto& message : outgoing) Post(std::move(message));
  return true;
}

void UcxNetwork::ReleaseUnwanted() {
  for (void* descriptor : std::exchange(unwanted_, {})) ucx_->ucp_am_data_release(worker_, descriptor);
}

void UcxNetwork::Sleep() {
  const ucp::Status status = ucx_->ucp_worker_arm(worker_);
  if (status == ucp::kBusy) return;
  sleeping_ = true;
  if (!queued_ && !stop_ && unwanted_.empty()) {
    pollfd fds[2] = {{ucx_worker_->event_fd(), POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    poll(fds, 2, static_cast<int>(std::chrono::milliseconds(kSleep).count()));
  }
  sleeping_ = false;
  uint64_t count;
  [[maybe_unused]] const ssize_t drained = read(wake_fd_, &count, sizeof(count));
}

void UcxNetwork::Post(std::unique_ptr<Outgoing> owned) {
  Peer& peer = peers_[owned->process];
  // A peer that has disconnected counts as lost, but still waits for the acknowledgement.
  const bool is_ack = owned->envelope.kind == Envelope::kDisconnectAck;
  if (!peer.endpoint || peer.failed || (!is_ack && receive_queue_.lost(owned->process))) {
    if (owned->sent) owned->sent(false);
    return;
  }
  Outgoing* const message = owned.release();
  sends_.insert(message);
  message->envelope.token = token_;
  message->envelope.process = process_;
  if (!is_ack) message->envelope.sequence = peer.sequence++;
  ucp::RequestParams params;
  params.mask = ucp::RequestParams::kCallback | ucp::RequestParams::kUserData | ucp::RequestParams::kFlags;
  params.flags = message->bytes <= eager_bytes_ ? ucp::RequestParams::kEager : ucp::RequestParams::kRendezvous;
  params.sent = OnSent;
  params.user_data = message;
  void* const request = ucx_->ucp_am_send_nbx(peer.endpoint, UcxWorker::kMessageId, &message->envelope,
                                              message->envelope.size_bytes(), message->data, message->bytes, &params);
  if (!request) {
    Finish(message, ucp::kOk);
  } else if (ucp::IsError(request)) {
    OnEndpointError(&peer, peer.endpoint, ucp::ErrorOf(request));
    Finish(message, ucp::ErrorOf(request));
  }
}

void UcxNetwork::Finish(Outgoing* message, ucp::Status status) {
  sends_.erase(message);
  if (message->sent) message->sent(status == ucp::kOk && !peers_[message->process].failed);
  delete message;
}

void UcxNetwork::PostControl(int process, Envelope::Kind kind) {
  auto message = std::make_unique<Outgoing>();
  message->network = this;
  message->process = process;
  message->envelope.kind = kind;
  Post(std::move(message));
}

ucp::Status UcxNetwork::OnActiveMessage(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                                        const ucp::ReceivedParams* params) {
  auto* const network = static_cast<UcxNetwork*>(arg);
  const bool rendezvous = params->attributes & ucp::ReceivedParams::kRendezvous;
  std::unique_ptr<RemotePayload> remote;
  if (rendezvous) remote = std::make_unique<Payload>(network, data, bytes);
  const ReceiveQueue::Disconnect disconnect =
      network->receive_queue_.Arrive(header, header_bytes, bytes, rendezvous ? nullptr : data, std::move(remote));
  if (disconnect.kind == Envelope::kDisconnect) {
    // Posted from the progress loop: UCX's callbacks must not start operations.
    network->Do([network, process = disconnect.process] { network->PostControl(process, Envelope::kDisconnectAck); });
  } else if (disconnect.kind == Envelope::kDisconnectAck) {
    network->peers_[disconnect.process].disconnecting = true;
  }
  return rendezvous ? ucp::kInProgress : ucp::kOk;
}

void UcxNetwork::OnEndpointError(void* arg, ucp::Endpoint, ucp::Status status) {
  Peer* const peer = static_cast<Peer*>(arg);
  if (peer->failed) return;
  peer->failed = true;
  peer->status = status;
  peer->network->has_errors_ = true;
}

void UcxNetwork::OnSent(void* request, ucp::Status status, void* user_data) {
  Outgoing* const message = static_cast<Outgoing*>(user_data);
  UcxNetwork* const network = message->network;
  network->Finish(message, status);
  network->ucx_->ucp_request_free(request);
}

void UcxNetwork::OnFetched(void* request, ucp::Status status, size_t, void* user_data) {
  const std::unique_ptr<Fetch> fetch(static_cast<Fetch*>(user_data));
  UcxNetwork* const network = fetch->network;
  network->fetches_.erase(fetch.get());
  if (!network->closing_) fetch->done(status == ucp::kOk);
  if (request) network->ucx_->ucp_request_free(request);
}

// Closes failed endpoints. UCX then ends all requests in progress on them and no longer accesses their memory.
bool UcxNetwork::HandleErrors() {
  if (!has_errors_) return false;
  has_errors_ = false;
  for (size_t process = 0; process < peers_.size(); ++process) {
    Peer& peer = peers_[process];
    if (peer.status == ucp::kOk || !peer.endpoint) continue;
    receive_queue_.Lose(static_cast<int>(process), peer.why.empty() ? ucx_->ucs_status_string(peer.status) : peer.why);
    ucp::RequestParams params;
    params.mask = ucp::RequestParams::kFlags;
    params.flags = ucp::RequestParams::kForce;
    void* const request = ucx_->ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &params);
    if (request && !ucp::IsError(request)) ucx_->ucp_request_free(request);
  }
  return true;
}

// Sends a disconnect to all peers and waits until they acknowledge that they have received everything. Closing a TCP
// connection earlier could destroy data that a peer has not read yet.
void UcxNetwork::Close() {
  closing_ = true;
  receive_queue_.Mute();
  RunQueue();
  for (size_t process = 0; process < peers_.size(); ++process)
    PostControl(static_cast<int>(process), Envelope::kDisconnect);
  ProgressUntil(DurationOf(options_.disconnect_s), [this] {
    for (size_t process = 0; process < peers_.size(); ++process) {
      const Peer& peer = peers_[process];
      // A peer that has disconnected itself needs nothing more, and its disconnect has been acknowledged.
      if (peer.endpoint && !peer.disconnecting && !receive_queue_.disconnected(static_cast<int>(process))) return false;
    }
    return true;
  });
  for (Peer& peer : peers_) OnEndpointError(&peer, peer.endpoint, ucp::kCanceled);
  HandleErrors();
  ProgressUntil(kClosing, [this] { return sends_.empty() && fetches_.empty(); });
  RunQueue();  // completes messages that were sent in the meantime
}

template <typename Done>
void UcxNetwork::ProgressUntil(Clock::duration limit, Done done) {
  const Clock::time_point end = Clock::now() + limit;
  Clock::time_point last_work = Clock::now();
  while (!done() && Clock::now() < end) {
    RunQueue();
    if (ucx_->ucp_worker_progress(worker_) != 0) {
      last_work = Clock::now();
    } else if (Clock::now() - last_work < kPoll) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPoll);  // leaves the processor to a peer that is late
    }
    HandleErrors();
  }
}

}  // namespace

bool HasRdma(const char* folder) {
  std::error_code error;
  return !std::filesystem::is_empty(folder, error) && !error;
}

StatusOr<std::unique_ptr<Network>> OpenUcxNetwork(const UcxOptions& options, int process, int num_processes,
                                                  uint64_t token, Receiver* receiver) {
  auto network = std::make_unique<UcxNetwork>(options, process, num_processes, token, receiver);
  JAXCOMM_RETURN_IF_ERROR(network->Open());
  return std::unique_ptr<Network>(std::move(network));
}

}  // namespace jaxcomm
