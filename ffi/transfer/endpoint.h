// An endpoint: the thread and the lock around a network, what it shows and what it reads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/status.h"
#include "transfer/reader.h"
#include "transfer/source.h"
#include "transport/tcp_network.h"

namespace jaxcomm {

struct EndpointStats {
  std::map<std::string, TcpNetwork::PeerTraffic> traffic;  // by name of the peer
  uint64_t rejected = 0;
  SourceCounters source;
  int64_t num_leases = 0;
  std::vector<uint64_t> failures;  // by Code
  Histogram opens;
  Histogram reads;
  ReadStages stages;
};

// Thread-safe.
class Endpoint : private FrameReceiver {
 public:
  static StatusOr<std::shared_ptr<Endpoint>> Start(const TcpNetwork::Options& options, int64_t max_lease_ms);
  ~Endpoint() override;
  // Ends all calls with an error, all leases and all connections.
  void Stop();

  std::string address() const { return network_->address(); }
  uint64_t incarnation() const { return network_->incarnation(); }

  // At the source: as Source.
  Error Expose(Exposure exposure, uint64_t* id);
  void Withdraw(uint64_t id, bool revoke);
  bool InUse(uint64_t id);
  void MarkReady(uint64_t id, uint32_t array);

  // At the reader: as Reader.
  StatusOr<int> Connect(const std::string& address);
  void Disconnect(int peer);  // the last call for it
  std::shared_ptr<Call> Open(int peer, const std::string& key, int64_t version, int64_t lease_ms);
  std::shared_ptr<Call> OpenAndRead(int peer, const std::string& key, int64_t version, int64_t lease_ms,
                                    const std::string& digest, bool closes, const std::vector<Piece>& from,
                                    std::vector<Piece> to, std::vector<StridedArray> arrays);
  std::shared_ptr<Call> Watch(int peer, const std::string& key, int64_t after);
  // Begins all reads before the data of the first ones keep the endpoint's thread busy.
  std::vector<std::shared_ptr<Call>> Read(std::vector<std::vector<ReadSource>> reads,
                                          const std::vector<StridedArray>& arrays);
  void Cancel(const std::shared_ptr<Call>& call, const Error& why);
  void Close(int peer, uint64_t lease);

  bool Wait(const std::shared_ptr<Call>& call, double limit_s);  // whether it is done
  Error ErrorOf(const std::shared_ptr<Call>& call);
  std::pair<int64_t, int64_t> Progress(const std::shared_ptr<Call>& call);  // bytes received, bytes in all
  // Calls `then` when the call is done, on the thread of the endpoint or at once. The call ends with kTimeout at the
  // deadline.
  void Then(const std::shared_ptr<Call>& call, std::chrono::steady_clock::time_point deadline,
            std::function<void(const Call&)> then);

  EndpointStats stats();
  std::vector<WaitingCall> Waiting();

 private:
  explicit Endpoint(int64_t max_lease_ms) : source_(max_lease_ms) {}
  void Run();
  TcpNetwork::Events NextEvents();
  // Does the work of the endpoint's thread for the peer of a call, until the call is done or nothing arrives.
  void Poll(const std::shared_ptr<Call>& call, std::chrono::duration<double> limit);
  // Does what has become due. Returns false once the endpoint ends.
  bool Advance(const TcpNetwork::Events& events);
  void RunDue();
  std::unique_lock<std::mutex> Lock();  // before the endpoint's thread takes it again
  void Notify();                        // of calls that may be done
  void OnPeer(int peer, bool client) override;
  char* OnBulk(int peer, const Frame& frame) override;
  void OnFrame(int peer, const Frame& frame, const char* payload) override;
  void OnRoom(int peer) override;
  void OnLost(int peer, const std::string& why) override;

  std::mutex mutex_;
  std::atomic<int> num_locking_{0};      // threads in Lock()
  std::atomic<uint64_t> num_locked_{0};  // by Lock()
  std::mutex done_mutex_;                // of waits, which do not need the other one
  std::condition_variable done_;
  Source source_;
  Reader reader_;
  std::unique_ptr<TcpNetwork> network_;
  std::atomic<bool> waits_for_slot_{false};
  bool ending_ = false;
  bool stopped_ = false;  // no thread reads memory of exposures
  std::thread thread_;
};

}  // namespace jaxcomm
