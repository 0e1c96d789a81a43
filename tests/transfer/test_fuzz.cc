// Peers without the secret, or with it but against the protocol: by hand, and at random with frames of valid tags.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "peer.h"

namespace jaxcomm {
namespace {

constexpr int64_t kCount = 1000;

struct Message {
  uint32_t kind;
  uint64_t id;
  uint64_t at;
  std::string payload;
};

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  std::string Mutated(std::string bytes) {
    for (uint64_t changes = Below(4); changes > 0; --changes) {
      const size_t at = Below(bytes.size() + 1);
      switch (Below(5)) {
        case 0:
          if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(at, Below(40), static_cast<char>(Below(256)));
          break;
        default:
          const uint64_t value = Number();
          const size_t size = Below(2) == 0 ? 4 : 8;
          if (at + size <= bytes.size()) std::memcpy(&bytes[at], &value, size);
      }
    }
    return bytes;
  }

  // The header of a message, sometimes with other numbers. Payload and size stay consistent, or the rest is cut off.
  Header Mutated(const Message& message, const std::string& payload) {
    Header header{{message.kind, static_cast<uint32_t>(payload.size()), message.id, message.at}, 0, 0, {}};
    if (Below(6) == 0) header.frame.kind ^= 1U << Below(32);
    if (Below(6) == 0) header.frame.id = Number();
    if (Below(6) == 0) header.frame.at = Number();
    if (Below(12) == 0) header.frame.bytes = static_cast<uint32_t>(Number());
    if (Below(12) == 0) header.slot = static_cast<uint32_t>(Number());
    return header;
  }

 private:
  uint64_t Number() {
    const uint64_t numbers[] = {0,       1,       2,        3,         16,         1000,
                                1 << 18, 1 << 20, 1U << 31, INT64_MAX, UINT64_MAX, uint64_t{1} << 63};
    return numbers[Below(std::size(numbers))] + Below(3) - 1;
  }
  std::mt19937_64 random_;
};

template <typename... T>
std::string Bytes(T... values) {
  Encoder encoder;
  (encoder.Put(values), ...);
  return encoder.bytes();
}

std::string Text(const std::string& text) {
  Encoder encoder;
  encoder.PutText(text);
  return encoder.bytes();
}

Header HeaderOf(uint32_t kind, const std::string& payload, uint64_t id = 1, uint64_t at = 0) {
  return {{kind, static_cast<uint32_t>(payload.size()), id, at}, 0, 0, {}};
}

// A source of an array, and a reader.
struct Pair {
  Pair() {
    Exposure exposure;
    exposure.key = "x";
    exposure.manifest = "manifest";
    exposure.arrays = {ArrayOf(memory)};
    exposure.ready = {true};
    CHECK(source->Expose(std::move(exposure), &id).ok());
  }
  void WaitFor(const std::function<bool(const EndpointStats&)>& condition) const {
    WaitUntil([&] { return condition(source->stats()); });
  }
  void CheckItServes() const {
    const int peer = ValueOf(reader->Connect(source->address()));
    const std::shared_ptr<Call> open = reader->Open(peer, "x", kLatest, 5000);
    CHECK(reader->Wait(open, kLimitS) && reader->ErrorOf(open).ok());
    std::vector<int32_t> into(kCount);
    const Piece all{0, {{0}, {kCount}}};
    const std::shared_ptr<Call> read = reader->Read({{{peer, open->lease, {all}, {all}}}}, {ArrayOf(into)})[0];
    CHECK(reader->Wait(read, kLimitS) && reader->ErrorOf(read).ok() && into == memory);
    reader->Disconnect(peer);
    WaitFor([](const EndpointStats& stats) { return stats.num_leases == 0; });
  }
  uint64_t OpenedBy(Peer& peer) const {
    peer.ProveAsClient(source->address());
    const std::string open = Text("x") + Bytes(int64_t{-1}, int64_t{1000000000}) + Text("");
    peer.SendFrame(HeaderOf(kOpenFrame, open), open);
    std::string payload;
    Frame opened = peer.ReceiveFrame(&payload);
    if (opened.kind == kMemoryFrame) opened = peer.ReceiveFrame(&payload);
    CHECK(opened.kind == kOpenedFrame && payload.substr(8, 8) == Bytes(int64_t{10000}));  // the longest lease
    return opened.at;
  }

  std::vector<int32_t> memory = std::vector<int32_t>(kCount, 7);
  const std::shared_ptr<Endpoint> source = Make("source", true);
  const std::shared_ptr<Endpoint> reader = Make("reader", false);
  uint64_t id = 0;
};

TEST_CASE("garbage, and a stranger who stops in the middle, move one counter") {
  const Pair pair;
  uint64_t rejected = 0;
  for (const std::string& data : {std::string(), std::string(4, '\0'), std::string("GET / HTTP/1.1\r\n"),
                                  std::string(4096, '\xff'), std::string("jaxcommT")}) {
    Peer peer(Peer::Dial(pair.source->address()), true);
    peer.SendBytes(data);
    if (data != "jaxcommT") peer.Drain();
    CHECK(peer.Ends());
    ++rejected;
    pair.WaitFor([&](const EndpointStats& stats) { return stats.rejected == rejected; });
  }
  const EndpointStats stats = pair.source->stats();
  CHECK(stats.traffic.empty() && stats.num_leases == 0);
  CHECK(stats.source.granted + stats.source.reads + stats.source.refused == 0);
  pair.CheckItServes();
}

// They stay connected, and each hundredth begins a proof.
void ManyStrangers(uint64_t count) {
  const Pair pair;
  std::vector<std::unique_ptr<Peer>> strangers(400);
  for (uint64_t i = 0; i < count; ++i) {
    std::unique_ptr<Peer>& stranger = strangers[i % strangers.size()];
    stranger = std::make_unique<Peer>(Peer::Dial(pair.source->address()), true);
    if (i % 100 == 0) stranger->SendBytes("jaxcommT");
    if (i % 500 == 499) pair.CheckItServes();  // by a new connection
  }
  strangers.clear();
  pair.WaitFor([&](const EndpointStats& stats) { return stats.rejected == count; });
  CHECK(pair.source->stats().source.granted == count / 500);
}

TEST_CASE("many strangers keep nobody out") { ManyStrangers(2000); }
TEST_CASE("10,000 strangers keep nobody out [full]") { ManyStrangers(10000); }

TEST_CASE("wrong and replayed proofs are refused without a tag, which would help a stranger") {
  const Pair pair;
  const EndpointAddress right = ValueOf(EndpointAddress::Parse(pair.source->address()));
  EndpointAddress restarted = right, renamed = right;
  ++restarted.incarnation;
  renamed.name = "other";
  Proof seen{};
  const auto answer = [&](const std::function<Proof(Peer&, const Hello&)>& make) {
    Peer peer(Peer::Dial(pair.source->address()), true);
    Hello hello;
    Reply reply;
    CHECK(peer.Receive(&hello, sizeof hello));
    seen = make(peer, hello);
    peer.SendBytes({reinterpret_cast<const char*>(&seen), sizeof seen});
    CHECK(peer.Receive(&reply, sizeof reply));
    const bool has_tag = std::count(std::begin(reply.tag), std::end(reply.tag), 0) < 32;
    CHECK(has_tag ? reply.answer == Answer::kAccepted : peer.Ends());
    return reply.answer;
  };
  const auto proof = [&](const EndpointAddress& to, uint32_t version = kProtocolVersion,
                         const std::string& secret = kSecret) {
    return answer([&](Peer& peer, const Hello& hello) { return peer.ProofFor(to, hello, version, secret); });
  };
  CHECK(proof(right, 9) == Answer::kWrongVersion);
  CHECK(proof(right, kProtocolVersion, "another secret...") == Answer::kWrongSecret);
  CHECK(proof(restarted) == Answer::kOtherIncarnation && proof(renamed) == Answer::kOtherIncarnation);
  CHECK(proof(right) == Answer::kAccepted);
  CHECK(answer([&](Peer&, const Hello&) { return seen; }) == Answer::kWrongSecret);
  pair.CheckItServes();
}

TEST_CASE("a peer that breaks the protocol is cut off") {
  const Pair pair;
  Header huge = HeaderOf(kOpenFrame, ""), bulk = HeaderOf(3U << 30 | 9, "", 0), wide = HeaderOf(kBulkFlag | 9, "", 0);
  huge.frame.bytes = kMaxControlBytes + 1;
  bulk.frame.bytes = 10;
  wide.frame.bytes = kMaxBulkBytes + 1;
  const std::string short_key = Bytes(uint32_t{1000}) + "x", no_pieces = Bytes(1U << 31),
                    dimensions = Bytes(uint32_t{1}, uint32_t{0}, 1U << 30);
  for (const auto& [header, payload] : std::vector<std::pair<Header, std::string>>{
           {HeaderOf(77, ""), ""},
           {HeaderOf(kMemoryFrame, ""), ""},
           {HeaderOf(kSlotFreeFrame, "", 0), ""},
           {HeaderOf(kSlotFreeFrame, "", kNumSlots), ""},
           {bulk, ""},
           {wide, ""},
           {huge, ""},
           {HeaderOf(kOpenFrame, short_key), short_key},
           {HeaderOf(kReadFrame, no_pieces), no_pieces},
           {HeaderOf(kReadFrame, dimensions), dimensions},
           {HeaderOf(kCancelFrame, ""), ""},
       }) {
    for (const bool local : {false, true}) {
      Peer peer(Peer::Dial(pair.source->address(), local), true);
      Header sent = header;
      sent.frame.at = pair.OpenedBy(peer);
      const std::string bytes = peer.SendFrame(sent, payload);
      if (header.frame.kind == kCancelFrame) peer.SendBytes(bytes);  // a replay
      CHECK(peer.Ends());
    }
  }
  pair.CheckItServes();
}

TEST_CASE("an address has a host and port, a name, an incarnation and a Unix socket") {
  const std::string incarnation = "/00000000000000ff/", local(32, 'a'), name(63, 'n');
  const EndpointAddress v6 = ValueOf(EndpointAddress::Parse("tcp://[::1]:80/" + name + incarnation + local));
  CHECK(v6.host == "::1" && v6.port == "80" && v6.name == name && v6.incarnation == 255 && v6.local == local);
  for (const std::string& text :
       {"tcp://h:80/" + name + "n" + incarnation, "tcp://h:80/x" + incarnation + local + "a", "tcp://h/x" + incarnation,
        "tcp://h:80/x" + incarnation + "/", std::string("tcp://h:80/x/0000000000000ff/"),
        std::string("tcp://h:80/x/000000000000000ff/"), std::string("tcp://h:80/x/00000000000000FF/")}) {
    CHECK(!EndpointAddress::Parse(text).ok());
  }
}

TEST_CASE("a peer neither closes nor reads the lease of another one") {
  const Pair pair;
  Peer owner(Peer::Dial(pair.source->address()), true), other(Peer::Dial(pair.source->address()), true);
  const uint64_t lease = pair.OpenedBy(owner);
  other.ProveAsClient(pair.source->address());
  other.SendFrame(HeaderOf(kCloseFrame, "", 0, lease), "");
  const std::string piece = Bytes(uint32_t{1}, uint32_t{0}, uint32_t{1}, int64_t{0}, int64_t{4});
  other.SendFrame(HeaderOf(kReadFrame, piece, 5, lease), piece);
  std::string text;
  const Frame refused = other.ReceiveFrame(&text);
  CHECK(refused.kind == kRefusedFrame && refused.id == 5 && refused.at == 3 && text == "the lease has ended");
  CHECK(pair.source->stats().num_leases == 1);
}

void FuzzSource(unsigned seed, int connections) {
  const Pair pair;
  const std::shared_ptr<Endpoint>& source = pair.source;
  Sha256 sha;
  sha.Update("manifest", 8);
  const Digest hash = sha.Finish();
  const std::string digest(hash.begin(), hash.end());
  Mutator mutator(seed);
  for (int i = 0; i < connections; ++i) {
    Peer peer(Peer::Dial(source->address()), true);
    if (mutator.Below(4) == 0) {  // a stranger
      Hello hello;
      CHECK(peer.Receive(&hello, sizeof hello));
      const Proof proof = peer.ProofFor(ValueOf(EndpointAddress::Parse(source->address())), hello);
      peer.SendBytes(mutator.Mutated({reinterpret_cast<const char*>(&proof), sizeof proof}));
      peer.Drain();
      continue;
    }
    const uint64_t lease = pair.OpenedBy(peer);
    const std::vector<Message> messages = {
        {kOpenFrame, 1, 0, Text("x") + Bytes(int64_t{-1}, int64_t{5000}) + Text("")},
        {kOpenFrame, 1, 0,
         Text("x") + Bytes(int64_t{-1}, int64_t{5000}) + Text(digest) +
             Bytes(uint64_t{9}, uint8_t{1}, uint32_t{1}, uint32_t{0}, uint32_t{1}, int64_t{0}, kCount)},
        {kReadFrame, 2, lease, Bytes(uint32_t{1}, uint32_t{0}, uint32_t{1}, int64_t{0}, kCount)},
        {kReadFrame, 3, lease,
         Bytes(uint32_t{2}, uint32_t{0}, uint32_t{1}, int64_t{9}, int64_t{20}, uint32_t{0}, uint32_t{1}, int64_t{0},
               int64_t{0})},
        {kWatchFrame, 4, 0, Text("x")},
        {kRenewFrame, 0, lease, ""},
        {kCancelFrame, 2, 0, ""},
        {kCloseFrame, 0, lease, ""},
        {kMemoryFrame, 0, 0, ""},
        {kSlotFreeFrame, 0, 1, ""},
        {kReadFrame | kBulkFlag, 0, lease, std::string(100, 'x')},
    };
    for (uint64_t left = 1 + mutator.Below(6); left > 0; --left) {
      const Message& message = messages[mutator.Below(messages.size())];
      const std::string payload = mutator.Mutated(message.payload);
      peer.SendFrame(mutator.Mutated(message, payload), payload);
    }
    peer.Drain();
  }
  pair.CheckItServes();
}

// Where a reader takes a peer for a source.
struct Server {
  Server() {
    sockaddr_in own = Loopback(0);
    socklen_t bytes = sizeof own;
    CHECK(bind(listener, reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0 && listen(listener, 16) == 0 &&
          getsockname(listener, reinterpret_cast<sockaddr*>(&own), &bytes) == 0);
    address = "tcp://127.0.0.1:" + std::to_string(ntohs(own.sin_port)) + "/fuzz/0000000000000000/";
  }
  ~Server() { close(listener); }
  int Accept() const { return accept(listener, nullptr, nullptr); }

  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  const std::shared_ptr<Endpoint> reader = Make("reader", false);
  std::string address;
};

TEST_CASE("a reader says what is wrong with a server") {
  const Server server;
  Hello other = kHello, newer = kHello;
  other.magic[7] = 'U';
  newer.version = 9;
  const auto why = [&](const Hello& hello, Answer answer, uint32_t version, const std::string& secret) {
    const std::shared_ptr<Call> open = server.reader->Open(ValueOf(server.reader->Connect(server.address)), "x", 1, 9);
    Peer peer(server.Accept(), false);
    peer.ProveAsServer(hello, answer, version, secret);
    CHECK(server.reader->Wait(open, kLimitS) && server.reader->ErrorOf(open).code == Code::kLost);
    return server.reader->ErrorOf(open).text;
  };
  constexpr uint32_t kOwn = kProtocolVersion;
  const std::string version = "it speaks version 9 of the protocol, this endpoint " + std::to_string(kOwn);
  CHECK(why(other, Answer::kAccepted, kOwn, kSecret) == "it is no endpoint of jaxcomm");
  CHECK(why(newer, Answer::kAccepted, kOwn, kSecret) == version);
  CHECK(why(kHello, Answer::kWrongVersion, 9, kSecret) == version);
  CHECK(why(kHello, static_cast<Answer>(9), kOwn, kSecret) == "it sent an unknown answer");
  CHECK(why(kHello, Answer::kAccepted, kOwn, "another") == "it does not know the secret of this endpoint");
}

TEST_CASE("a source answers no call of another one, nor with a wrong tag") {
  const Server server;
  Endpoint& reader = *server.reader;
  std::vector<int32_t> into(1);
  const Piece all{0, {{0}, {1}}};
  const int first = ValueOf(reader.Connect(server.address)), second = ValueOf(reader.Connect(server.address));
  Peer asked(server.Accept(), false), other(server.Accept(), false);
  const std::shared_ptr<Call> open = reader.Open(first, "x", 1, 5000);
  const std::shared_ptr<Call> read = reader.Read({{{first, 5, {all}, {all}}}}, {ArrayOf(into)})[0];
  const std::shared_ptr<Call> own = reader.Read({{{second, 5, {all}, {all}}}}, {ArrayOf(into)})[0];
  CHECK(asked.ProveAsServer() && other.ProveAsServer());
  const std::string opened = Bytes(int64_t{1}, int64_t{5000}, uint8_t{0}) + Text("");
  other.SendFrame(HeaderOf(kOpenedFrame, opened, open->id, 5), opened);
  other.SendFrame(HeaderOf(kDataFrame | kBulkFlag, "data", read->id), "data");
  other.SendFrame(HeaderOf(kEndFrame, "", read->id, 4), "");
  other.SendFrame(HeaderOf(kDataFrame | kBulkFlag, "data", own->id), "data", 1);
  CHECK(reader.Wait(own, kLimitS) && reader.ErrorOf(own).text == "it sent a frame with a wrong tag");
  CHECK(!open->done && !read->done && into[0] == 0);
}

// A source that answers an open and a read with mutated frames. What the reader takes for whole must be whole.
void FuzzReader(unsigned seed, int connections) {
  const Server server;
  const std::shared_ptr<Endpoint>& reader = server.reader;
  Mutator mutator(seed);
  int whole = 0;
  for (int i = 0; i < connections; ++i) {
    const int number = ValueOf(reader->Connect(server.address));
    Peer peer(server.Accept(), false);
    CHECK(peer.ProveAsServer());
    const std::shared_ptr<Call> open = reader->Open(number, "x", kLatest, 5000);
    std::vector<int32_t> into(kCount, 0);
    const Piece all{0, {{0}, {kCount}}};
    const std::shared_ptr<Call> read = reader->Read({{{number, 5, {all}, {all}}}}, {ArrayOf(into)})[0];
    std::string content(kCount * 4, '\0');
    for (size_t at = 0; at < content.size(); at += 4) content[at] = 7;
    const uint64_t half = content.size() / 2;
    std::vector<Message> messages = {
        {kOpenedFrame, open->id, 5, Bytes(int64_t{1}, int64_t{5000}, uint8_t{0}) + Text("manifest")},
        {kDataFrame | kBulkFlag, read->id, 0, content.substr(0, half)},
        {kDataFrame | kBulkFlag, read->id, half, content.substr(half)},
        {kEndFrame, read->id, content.size(), ""},
    };
    const std::vector<Message> others = {
        {kRefusedFrame, read->id, 3, "no"}, {kRefusedFrame, open->id, 0, "no"},
        {kNoticeFrame, open->id, 9, ""},    {kOpenedFrame, read->id, 5, messages[0].payload},
        {kEndFrame, open->id, 0, ""},       {kEndFrame, read->id, 0, ""},
        {kDataFrame, read->id, 0, content}, {kMemoryFrame, 0, 0, ""},
        {kSlotFreeFrame, 0, 1, ""},
    };
    const bool mutate = i % 4 != 0;
    if (mutate && mutator.Below(2) == 0) {
      const size_t at = mutator.Below(messages.size());
      messages.insert(messages.begin() + static_cast<std::ptrdiff_t>(at), others[mutator.Below(others.size())]);
    }
    for (const Message& message : messages) {
      const bool here = mutate && mutator.Below(3) == 0;
      const bool data = (message.kind & kBulkFlag) != 0;  // its bytes are not protected
      const std::string payload = here && !data ? mutator.Mutated(message.payload) : message.payload;
      const Header plain = HeaderOf(message.kind, payload, message.id, message.at);
      peer.SendFrame(here ? mutator.Mutated(message, payload) : plain, payload);
    }
    if (mutate) {
      peer.Drain();
    } else {
      CHECK(reader->Wait(read, kLimitS) && reader->ErrorOf(read).ok());
    }
    reader->Disconnect(number);
    CHECK(reader->Wait(open, kLimitS) && reader->Wait(read, kLimitS));
    if (reader->ErrorOf(read).ok()) {
      ++whole;
      CHECK(std::all_of(into.begin(), into.end(), [](int32_t x) { return x == 7; }));
    }
  }
  CHECK(whole >= connections / 4);
}

TEST_CASE("a source survives mutated requests") { FuzzSource(1, 600); }
TEST_CASE("a source survives many mutated requests [full]") { FuzzSource(3, 20000); }
TEST_CASE("a reader survives mutated answers and shows whole reads only") { FuzzReader(2, 600); }
TEST_CASE("a reader survives many mutated answers [full]") { FuzzReader(4, 20000); }

}  // namespace
}  // namespace jaxcomm
