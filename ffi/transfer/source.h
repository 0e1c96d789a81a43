// What an endpoint shows to others: objects with versions, and offers of cache pages. Leases keep them.
//
// All memory is read under the lock of the endpoint. So no byte is read after Withdraw with `revoke`, or once InUse is
// false.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/protocol.h"
#include "transfer/strided.h"
#include "transport/tcp_network.h"

namespace jaxcomm {

struct Exposure {
  std::string key;
  int64_t version = 0;
  std::string manifest;  // opaque here
  std::string digest;    // its SHA-256; Expose sets it
  std::vector<StridedArray> arrays;
  std::vector<bool> ready;  // by array; reads of others wait for MarkReady
  std::string reader;       // the name of the only endpoint that may read; empty: any
  bool once = false;        // one lease only, which may be taken until `expires`
  std::chrono::steady_clock::time_point expires = std::chrono::steady_clock::time_point::max();
  // A counter for each page of the pool that changes with each new use of the page. Null: the memory does not change.
  const int64_t* generations = nullptr;
  std::vector<std::pair<int64_t, int64_t>> expected;  // page, its generation

  uint64_t id = 0;
  int64_t num_leases = 0;
  bool used = false;       // a lease has been taken
  bool withdrawn = false;  // new leases are refused
  bool revoked = false;    // and so are reads under leases
};

struct SourceCounters {
  uint64_t granted = 0;
  uint64_t renewed = 0;
  uint64_t expired = 0;
  uint64_t revoked = 0;
  uint64_t reads = 0;
  uint64_t refused = 0;
};

class Source {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Source(int64_t max_lease_ms) : max_lease_ms_(max_lease_ms) {}
  void SetNetwork(TcpNetwork* network) { network_ = network; }

  // Versions of a key must grow. Returns a number for the calls below.
  Error Expose(Exposure exposure, uint64_t* id);
  void Withdraw(uint64_t id, bool revoke);
  bool InUse(uint64_t id) const;
  void MarkReady(uint64_t id, uint32_t array);

  void OnFrame(int peer, const Frame& frame, Decoder payload);
  void OnRoom(int peer);
  void OnLost(int peer);
  void OnTime(Clock::time_point now);

  const SourceCounters& counters() const { return counters_; }
  int64_t num_leases() const { return static_cast<int64_t>(leases_.size()); }

 private:
  struct Lease {
    int peer;
    std::shared_ptr<Exposure> exposure;
    std::chrono::milliseconds length;
    Clock::time_point expires;
  };
  struct Read {
    uint64_t id;
    uint64_t lease;
    bool closes;  // the lease ends with it
    std::shared_ptr<Exposure> exposure;
    PieceWalk walk;
    int64_t total_bytes = 0;
    int64_t sent_bytes = 0;
  };
  struct Watch {
    int peer;
    uint64_t id;
    int64_t after;
  };

  const Exposure* Find(uint64_t id) const;
  void OnOpen(int peer, const Frame& frame, Decoder payload);
  void OnRead(int peer, const Frame& frame, Decoder payload);
  void StartRead(int peer, uint64_t id, uint64_t lease, bool closes, Decoder payload);
  void OnWatch(int peer, const Frame& frame, Decoder payload);
  void OnCancel(int peer, uint64_t id);
  void Refuse(int peer, uint64_t id, Code code, const std::string& text);
  void EndLease(uint64_t id);
  void Collect(uint64_t id);
  bool IsReady(const Read& read) const;
  void Pack(Read& read, char* to, int64_t bytes);
  // Why the bytes of a read are not valid now.
  Error Check(const Read& read) const;
  int64_t NewestOf(const std::string& key) const;
  void Notify(const std::string& key);

  const int64_t max_lease_ms_;
  TcpNetwork* network_ = nullptr;
  std::map<uint64_t, std::shared_ptr<Exposure>> exposures_;
  std::map<std::string, std::map<int64_t, uint64_t>> versions_;  // those that can be opened
  std::map<std::string, int64_t> newest_;                        // ever, of objects
  std::map<uint64_t, Lease> leases_;
  std::map<int, std::deque<Read>> reads_;  // by peer, in turn
  std::multimap<std::string, Watch> watches_;
  uint64_t next_id_ = 1;
  SourceCounters counters_;
};

}  // namespace jaxcomm
