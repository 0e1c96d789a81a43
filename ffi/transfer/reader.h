// What an endpoint reads from others. A call has an answer, an error of the source, or the end of the connection.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/protocol.h"
#include "transfer/strided.h"
#include "transport/tcp_network.h"

namespace jaxcomm {

// Where a read may read `from` under a lease, into `to`.
struct ReadSource {
  int peer;
  uint64_t lease;
  std::vector<Piece> from;
  std::vector<Piece> to;
};

// A call, shared by who waits for it and the endpoint. Guarded by the endpoint's lock.
struct Call {
  int peer = -1;
  uint64_t id = 0;
  FrameKind answer{};  // that ends it
  std::string key;     // of what it asks for
  bool retry = false;  // it began on a connection that was there before: if this one is lost, a new one may do
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  std::atomic<bool> done{false};  // waits read it without the lock
  Error error;
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  std::vector<std::function<void(const Call&)>> then;  // called once it is done, without the lock

  int64_t version = kLatest;
  // Of an open or a watch.
  uint64_t lease = 0;          // of a read too, if the lease ends with it
  std::string manifest;        // empty if the source's has the digest that the reader has named
  std::shared_ptr<Call> read;  // of an open with a read
  bool closes = false;         // the lease ends with this read

  // Of a read: its destination.
  std::vector<StridedArray> arrays;
  PieceWalk walk;
  bool placing = false;  // the network writes to the destination
  std::vector<ReadSource> others;
  int64_t received_bytes = 0;
  int64_t total_bytes = 0;
  std::chrono::steady_clock::time_point first;  // when the first data came, and the last
  std::chrono::steady_clock::time_point last;
  std::chrono::steady_clock::duration place{};
};

// How many calls took how long: element i counts those of at least 2^(i-1) and less than 2^i microseconds.
class Histogram {
 public:
  void Add(std::chrono::steady_clock::duration time) {
    auto us = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
    sum_us_ += us;
    size_t i = 0;
    for (; us > 0 && i + 1 < counts_.size(); us >>= 1) ++i;
    ++counts_[i];
  }
  const std::array<uint64_t, 36>& counts() const { return counts_; }
  uint64_t sum_us() const { return sum_us_; }

 private:
  uint64_t sum_us_ = 0;
  std::array<uint64_t, 36> counts_{};
};

// Where the time of reads goes.
struct ReadStages {
  std::chrono::steady_clock::duration wait{};    // until the first data
  std::chrono::steady_clock::duration wire{};    // until the last data, without `place`
  std::chrono::steady_clock::duration place{};   // copies to the destination, unless the network writes there
  std::chrono::steady_clock::duration commit{};  // from the last data to the end
};

// A call without an answer yet.
struct WaitingCall {
  int peer;
  FrameKind answer;
  std::string key;
  int64_t version;
  double seconds;
  int64_t received_bytes;
  int64_t total_bytes;
};

class Reader {
 public:
  using Clock = std::chrono::steady_clock;

  void SetNetwork(TcpNetwork* network) { network_ = network; }

  void Add(int peer) { peers_[peer]; }
  void Forget(int peer) {
    EraseLeases(peer);
    peers_.erase(peer);
  }
  bool Has(int peer) const { return peers_.count(peer) != 0; }
  std::shared_ptr<Call> Open(int peer, const std::string& key, int64_t version, int64_t lease_ms);
  // An open that also reads, in one round trip, if the manifest has this digest: the call, whose `read` is the read.
  // With another manifest, or without a lease, the read ends with the open. `closes`: the lease ends with the read.
  std::shared_ptr<Call> OpenAndRead(int peer, const std::string& key, int64_t version, int64_t lease_ms,
                                    const std::string& digest, bool closes, const std::vector<Piece>& from,
                                    std::vector<Piece> to, std::vector<StridedArray> arrays);
  std::shared_ptr<Call> Watch(int peer, const std::string& key, int64_t after);
  // Reads from the first of the sources into `arrays`, whose memory must stay until the call is done. If a source is
  // lost, the read begins again at the next one.
  std::shared_ptr<Call> Read(std::vector<ReadSource> sources, std::vector<StridedArray> arrays);
  // Ends a call at once. Nothing is written to its destination any more.
  void Cancel(const std::shared_ptr<Call>& call, const Error& why);
  void Close(int peer, uint64_t lease);

  void OnPeer(int peer);
  char* OnBulk(int peer, const Frame& frame);
  void OnFrame(int peer, const Frame& frame, const char* payload);
  void OnLost(int peer, const std::string& why);
  void OnTime(Clock::time_point now);
  void EndAll(const Error& why);

  // Calls that are done and have something to do then.
  std::vector<std::shared_ptr<Call>> TakeDue() { return std::exchange(due_, {}); }

  std::vector<WaitingCall> Waiting() const;
  const Histogram& opens() const { return opens_; }  // without those that failed, as reads()
  const Histogram& reads() const { return reads_; }
  const ReadStages& stages() const { return stages_; }
  uint64_t failures(Code code) const {
    const auto found = failures_.find(code);
    return found == failures_.end() ? 0 : found->second;
  }

 private:
  struct Lease {
    std::string key;
    int64_t version;
    std::chrono::milliseconds length;
    Clock::time_point renew;
  };
  struct Peer {
    bool open = false;
    std::vector<std::pair<Frame, std::string>> waiting;  // frames for after the proof
    std::string lost;                                    // why the connection has ended
  };

  void EraseLeases(int peer) { leases_.erase(leases_.lower_bound({peer, 0}), leases_.lower_bound({peer + 1, 0})); }
  // counts: whether a lost peer is a failure of its own.
  std::shared_ptr<Call> Begin(int peer, FrameKind answer, const std::string& key, int64_t version, bool counts = true);
  // Sets the destination and appends `from` to the request. Ends the call if it is not valid.
  void PutRead(Call& call, const std::vector<Piece>& from, std::vector<Piece> to, Encoder* request);
  void SendRead(Call& call, ReadSource source);
  bool GoOn(Call& call);  // whether the read of a lost source has begun at another one
  void Send(int peer, const Frame& frame, const std::string& payload);
  void Finish(Call& call, Error error, bool counts = true);
  void OnOpened(Call& call, const Frame& frame, const char* payload);

  TcpNetwork* network_ = nullptr;
  std::map<int, Peer> peers_;
  std::map<uint64_t, std::shared_ptr<Call>> calls_;
  std::map<std::pair<int, uint64_t>, Lease> leases_;  // peer, number of the source's
  std::vector<std::shared_ptr<Call>> due_;
  std::map<Code, uint64_t> failures_;
  Histogram opens_, reads_;
  ReadStages stages_;
  uint64_t next_id_ = 1;
};

}  // namespace jaxcomm
