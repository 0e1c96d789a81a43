// Endpoints, and a peer with its own code for the handshake and the tags, which may break the protocol.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../check.h"
#include "transfer/endpoint.h"
#include "transport/tcp_connection.h"

namespace jaxcomm {

inline const std::string kSecret = "a secret of tests only";
inline constexpr Hello kHello = {{'j', 'a', 'x', 'c', 'o', 'm', 'm', 'T'}, kProtocolVersion, 0, {}};

inline constexpr double kLimitS = 120;

inline std::shared_ptr<Endpoint> Make(const std::string& name, bool shared_memory) {
  TcpNetwork::Options options;
  options.name = name;
  options.secret = kSecret;
  options.host = "127.0.0.1";
  options.port = "0";
  options.shared_memory = shared_memory;
  return ValueOf(Endpoint::Start(options, 10000));
}

inline StridedArray ArrayOf(std::vector<int32_t>& memory) {
  return {reinterpret_cast<char*>(memory.data()), 4, {static_cast<int64_t>(memory.size())}, {4}, -1, {}};
}

template <typename Condition>
void WaitUntil(const Condition& condition) {
  const auto began = std::chrono::steady_clock::now();
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(60));
    std::this_thread::yield();
  }
}

inline sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

class Peer {
 public:
  Peer(int fd, bool client) : fd_(fd), client_(client) {
    const timeval limit = {60, 0};
    CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
  }
  ~Peer() { close(fd_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  static int Dial(const std::string& address, bool local = false) {
    const EndpointAddress parts = ValueOf(EndpointAddress::Parse(address));
    const int fd = socket(local ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    const sockaddr_in to = Loopback(std::stoi(parts.port));
    sockaddr_un near{AF_UNIX, {}};
    const size_t size = ("jaxcomm-" + parts.local).copy(near.sun_path + 1, 100) + offsetof(sockaddr_un, sun_path) + 1;
    CHECK(connect(fd, local ? reinterpret_cast<sockaddr*>(&near) : reinterpret_cast<const sockaddr*>(&to),
                  local ? static_cast<socklen_t>(size) : sizeof to) == 0);
    return fd;
  }

  bool Receive(void* data, size_t bytes) { return recv(fd_, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes); }
  void SendBytes(const std::string& bytes) { (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // Waits until the other side closes the connection. False if it does not.
  bool Ends() {
    char data[4096];
    ssize_t got = 0;
    while ((got = recv(fd_, data, sizeof data, 0)) > 0) continue;
    return got == 0 || errno == ECONNRESET;
  }
  void Drain() {
    shutdown(fd_, SHUT_WR);
    Ends();
  }

  Proof ProofFor(const EndpointAddress& server, const Hello& hello, uint32_t version = kProtocolVersion,
                 const std::string& secret = kSecret) {
    Proof proof{};
    proof.hello = hello;
    proof.hello.version = version;
    std::fill(std::begin(proof.hello.nonce), std::end(proof.hello.nonce), 7);
    proof.server_incarnation = server.incarnation;
    std::memcpy(proof.name, "fuzz", 4);
    server.name.copy(proof.server_name, sizeof proof.server_name);
    const Digest tag = Hmac(secret).Of("client" + Said(hello, proof));
    std::copy(tag.begin(), tag.end(), proof.tag);
    return proof;
  }
  void ProveAsClient(const std::string& address) {
    Hello hello;
    Reply reply;
    CHECK(Receive(&hello, sizeof hello));
    const Proof proof = ProofFor(ValueOf(EndpointAddress::Parse(address)), hello);
    SendBytes({reinterpret_cast<const char*>(&proof), sizeof proof});
    CHECK(Receive(&reply, sizeof reply) && reply.answer == Answer::kAccepted);
    SetKey(hello, proof);
  }
  bool ProveAsServer(const Hello& hello = kHello, Answer answer = Answer::kAccepted,
                     uint32_t version = kProtocolVersion, const std::string& secret = kSecret) {
    SendBytes({reinterpret_cast<const char*>(&hello), sizeof hello});
    Proof proof;
    if (!Receive(&proof, sizeof proof)) return false;
    Reply reply{answer, version, {}};
    const Digest tag = Hmac(secret).Of("server" + Said(hello, proof));
    std::copy(tag.begin(), tag.end(), reply.tag);
    SendBytes({reinterpret_cast<const char*>(&reply), sizeof reply});
    SetKey(hello, proof);
    return true;
  }
  // With a tag that is right for what is sent, unless some of its bits are `wrong`. Returns the bytes.
  std::string SendFrame(const Header& from, const std::string& payload, uint8_t wrong = 0) {
    Header header = from;
    Hmac mac = key_;
    const uint64_t numbers[2] = {sent_++, client_ ? 1U : 0U};
    mac.Update(numbers, sizeof numbers);
    mac.Update(&header, offsetof(Header, tag));
    if ((header.frame.kind & kBulkFlag) == 0) mac.Update(payload.data(), payload.size());
    const Digest digest = mac.Finish();
    std::copy_n(digest.begin(), sizeof header.tag, header.tag);
    header.tag[15] ^= wrong;
    std::string bytes = std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
    SendBytes(bytes);
    return bytes;
  }
  Frame ReceiveFrame(std::string* payload) {
    Header header;
    CHECK(Receive(&header, sizeof header));
    payload->resize(header.frame.bytes);
    CHECK(Receive(payload->data(), payload->size()));
    return header.frame;
  }

 private:
  static std::string Said(const Hello& hello, const Proof& proof) {
    return std::string(reinterpret_cast<const char*>(&hello), sizeof hello) +
           std::string(reinterpret_cast<const char*>(&proof), offsetof(Proof, tag));
  }
  void SetKey(const Hello& hello, const Proof& proof) {
    const Digest key = Hmac(kSecret).Of("connection" + Said(hello, proof));
    key_ = Hmac(std::string(key.begin(), key.end()));
  }

  const int fd_;
  const bool client_;
  Hmac key_;
  uint64_t sent_ = 0;
};

}  // namespace jaxcomm
