// A connection of TcpNetwork, and what crosses it. For tcp_handshake.cc and tcp_network.cc only.
#pragma once

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/sha256.h"
#include "transport/shared_memory.h"
#include "transport/tcp_network.h"

namespace jaxcomm {

constexpr uint32_t kProtocolVersion = 4;
// Of kMaxBulkBytes in the memory of a connection: one fills while the other is read. Both fit a cache of 2 MiB, so that
// processes on one core copy twice in the time of a copy from memory to memory.
constexpr size_t kNumSlots = 2;

// Event ids of what is no connection.
constexpr int kWakeEvent = -1, kListenerEvent = -2, kLocalListenerEvent = -3;

// Kinds of frames of the network itself.
constexpr uint32_t kMemoryFrame = 1 << 16;  // brings the descriptor of the shared memory
constexpr uint32_t kSlotFreeFrame = 2 << 16;
constexpr uint32_t kBulkFlag = 1U << 31;  // the payload has no tag
constexpr uint32_t kSlotFlag = 1U << 30;  // and is in slot `slot` of the shared memory

// Messages of the handshake, of a fixed size each.
struct Hello {  // server to client
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint8_t nonce[32];
};
struct Proof {  // client to server
  Hello hello;
  uint64_t incarnation;
  uint64_t server_incarnation;
  char name[kMaxNameBytes];
  char server_name[kMaxNameBytes];
  uint8_t tag[32];
};
enum class Answer : uint32_t { kAccepted, kWrongVersion, kWrongSecret, kOtherIncarnation };
struct Reply {  // server to client
  Answer answer;
  uint32_t version;
  uint8_t tag[32];
};
static_assert(sizeof(Hello) + sizeof(Proof) <= 1024, "a stranger sends at most 1 KiB");

struct Header {
  Frame frame;
  uint32_t slot;
  uint32_t reserved;
  uint8_t tag[16];
};
static_assert(sizeof(Header) == 48, "no padding goes over the wire");

struct TcpNetwork::Connection {
  enum class State : uint8_t { kConnecting, kHello, kProof, kReply, kOpen };

  int peer = -1;
  int fd = -1;
  bool client = false;
  bool local = false;
  State state = State::kHello;
  std::chrono::steady_clock::time_point deadline;
  EndpointAddress server;  // at the client
  std::string peer_name;
  std::string why;  // it ended; empty: it lives
  bool busy = false;
  uint32_t watched = EPOLLIN;  // events that end Wait
  int num_pollers = 0;

  Hello hello{};
  Proof proof{};
  Hmac key;  // of this connection
  uint64_t sent = 0;
  uint64_t received = 0;

  std::vector<char> in;  // the message or control payload that is arriving
  size_t have = 0;       // of it, or of the payload
  bool in_payload = false;
  Header header{};
  char* sink = nullptr;  // of the payload
  int incoming_fd = -1;

  std::vector<char> out;
  size_t out_begin = 0;
  size_t out_end = 0;
  int outgoing_fd = -1;

  std::unique_ptr<SharedMemory> memory;
  std::vector<uint32_t> free_slots;  // at the server
  PeerTraffic* by_peer = nullptr;    // null before the proof

  Traffic& traffic() const { return memory != nullptr ? by_peer->shared_memory : by_peer->tcp; }

  char* Extend(size_t bytes) {
    if (out_begin == out_end) out_begin = out_end = 0;
    if (out.size() < out_end + bytes) out.resize(std::max(out_end + bytes, 2 * out.size()));
    out_end += bytes;
    return out.data() + out_end - bytes;
  }
  void Put(const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(Extend(bytes), data, bytes);
  }
  size_t queued() const { return out_end - out_begin; }

  std::array<uint8_t, 16> TagOf(const Header& header, const char* payload, uint64_t number, bool from_client) const {
    Hmac mac = key;
    const uint64_t numbers[2] = {number, from_client ? 1U : 0U};
    mac.Update(numbers, sizeof numbers);
    mac.Update(&header, offsetof(Header, tag));
    if (payload != nullptr) mac.Update(payload, header.frame.bytes);
    const Digest digest = mac.Finish();
    std::array<uint8_t, 16> tag;
    std::copy_n(digest.begin(), tag.size(), tag.begin());
    return tag;
  }

  ~Connection() {
    for (const int each : {fd, incoming_fd}) {
      if (each >= 0) close(each);
    }
  }
};

}  // namespace jaxcomm
