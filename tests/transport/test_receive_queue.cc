// Order and destinations of incoming messages, one by one. The test acts as the network.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/transport/receive_queue.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr uint64_t kToken = 42;
constexpr size_t kBytes = 100;

using Said = std::vector<std::string>;

// Records its calls, and gives payloads a destination if the test has set one.
struct Notes : Receiver {
  Said said;
  char* place = nullptr;

  void* OnMessage(const Message& message) override {
    said.push_back("place of " + std::to_string(message.id));
    return place;
  }
  void OnDelivered(const Message& message) override {
    CHECK(message.process == 1 && message.header_bytes == 3 && std::memcmp(message.header, "abc", 3) == 0);
    said.push_back(std::to_string(message.id) + " in " + std::to_string(message.channel));
  }
  void OnPeerLost(int process, const std::string& why) override {
    said.push_back(std::to_string(process) + " lost: " + why);
  }
  Said News() { return std::exchange(said, {}); }
};

// A payload at its sender, and its state.
struct Remote {
  int fetches = 0;
  void* destination = nullptr;
  std::function<void(bool)> done;
  bool released = false;
};
struct Payload : RemotePayload {
  explicit Payload(Remote& remote) : remote_(remote) {}
  ~Payload() override { remote_.released = true; }
  void Fetch(void* destination, std::function<void(bool)> done) override {
    ++remote_.fetches;
    remote_.destination = destination;
    remote_.done = std::move(done);
  }
  Remote& remote_;
};

struct Wire {
  Notes notes;
  ReceiveQueue queue{&notes, 0, 3, kToken};
  char data[kBytes] = {};

  static Envelope Of(uint64_t sequence, uint64_t channel = 0) {
    Envelope envelope;
    envelope.token = kToken;
    envelope.process = 1;
    envelope.sequence = sequence;
    envelope.channel = channel;
    envelope.header_bytes = 3;
    std::memcpy(envelope.header, "abc", 3);
    return envelope;
  }
  ReceiveQueue::Disconnect Send(const Envelope& envelope, size_t bytes = 0) {
    return queue.Arrive(&envelope, envelope.size_bytes(), bytes, bytes > 0 ? data : nullptr, nullptr);
  }
  void Offer(const Envelope& envelope, Remote& remote) {
    queue.Arrive(&envelope, envelope.size_bytes(), kBytes, nullptr, std::make_unique<Payload>(remote));
  }
};

TEST_CASE("messages are delivered in the order of their numbers") {
  Wire wire;
  wire.Send(Wire::Of(2, 5));
  wire.Send(Wire::Of(1, 6), kBytes);
  CHECK(wire.notes.said.empty());
  char place[kBytes];
  wire.notes.place = place;
  wire.data[99] = 'x';  // the queue has copied the early message
  wire.Send(Wire::Of(0, 7));
  CHECK((wire.notes.News() == Said{"0 in 7", "place of 1", "1 in 6", "2 in 5"}));
  CHECK(place[99] == 0);
  CHECK(wire.queue.messages(1) == 3 && wire.queue.bytes(1) == kBytes && wire.queue.messages(2) == 0);
}

TEST_CASE("duplicates and messages of other jobs are dropped and counted") {
  Wire wire;
  wire.Send(Wire::Of(0));
  wire.Send(Wire::Of(2));
  wire.notes.News();
  uint64_t refused = 0;
  const auto refuse = [&](const std::function<void(Envelope&)>& change) {
    Envelope envelope = Wire::Of(1);
    change(envelope);
    wire.Send(envelope);
    CHECK(wire.queue.rejected() == ++refused && wire.notes.said.empty());
  };
  refuse([](Envelope& e) { e.sequence = 0; });  // already delivered
  refuse([](Envelope& e) { e.sequence = 2; });  // already held
  refuse([](Envelope& e) { e.token ^= 1; });
  refuse([](Envelope& e) { e.process = 0; });  // this process itself
  refuse([](Envelope& e) { e.process = -1; });
  refuse([](Envelope& e) { e.process = 3; });
  const Envelope whole = Wire::Of(1);
  for (const size_t bytes :
       {size_t{0}, offsetof(Envelope, header) - 1, whole.size_bytes() - 1, whole.size_bytes() + 1}) {
    wire.queue.Arrive(&whole, bytes, 0, nullptr, nullptr);
    CHECK(wire.queue.rejected() == ++refused && wire.notes.said.empty());
  }
  wire.Send(whole);
  CHECK((wire.notes.News() == Said{"1 in 0", "2 in 0"}) && wire.queue.rejected() == refused);
}

// Captures the text that `run` writes to standard error.
std::string Warnings(const std::function<void()>& act) {
  std::FILE* const file = std::tmpfile();
  const int saved = dup(STDERR_FILENO);
  CHECK(file != nullptr && saved >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
  act();
  CHECK(dup2(saved, STDERR_FILENO) >= 0 && close(saved) == 0);
  std::rewind(file);
  std::string text(10000, 0);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

// The number of dropped messages in each line of a warning.
std::vector<int> Dropped(const std::string& text) {
  std::vector<int> counts;
  const std::string before = "process 0 has dropped ";
  for (size_t at = text.find(before); at != std::string::npos; at = text.find(before, at + 1)) {
    counts.push_back(std::stoi(text.substr(at + before.size())));
  }
  return counts;
}

TEST_CASE("a warning about dropped messages comes at once, then at intervals, and at the end for all") {
  const auto refuse = [](ReceiveQueue& queue) {
    for (int i = 0; i < 3; ++i) queue.Arrive("x", 1, 0, nullptr, nullptr);
  };
  Notes notes;
  using Duration = ReceiveQueue::Clock::duration;
  ReceiveQueue usual(&notes, 0, 3, kToken), once(&notes, 0, 3, kToken, Duration::max());
  ReceiveQueue always(&notes, 0, 3, kToken, Duration::zero());
  CHECK((Dropped(Warnings([&] { refuse(once); })) == std::vector<int>{1}));  // even if the clock has just started
  CHECK((Dropped(Warnings([&] { refuse(usual); })) == std::vector<int>{1}));
  CHECK((Dropped(Warnings([&] { usual.Mute(); })) == std::vector<int>{3}));
  CHECK((Dropped(Warnings([&] { refuse(always); })) == std::vector<int>{1, 2, 3}));
  CHECK(Warnings([&] { always.Mute(); }).empty());
}

TEST_CASE("a payload without a destination delays only its channel") {
  Wire wire;
  wire.data[0] = 'x';
  wire.Send(Wire::Of(0, 5), kBytes);
  wire.Send(Wire::Of(1, 5));
  wire.Send(Wire::Of(2, 6));
  CHECK((wire.notes.News() == Said{"place of 0", "2 in 6"}));
  char place[kBytes] = {};
  wire.data[0] = 'y';              // the network reuses its buffer
  wire.queue.Accept(1, 7, place);  // no such message
  wire.queue.Accept(1, 1, place);  // it has no payload
  CHECK(wire.notes.said.empty());
  wire.queue.Accept(1, 0, place);
  CHECK(place[0] == 'x' && (wire.notes.News() == Said{"0 in 5", "1 in 5"}));
  wire.queue.Accept(1, 0, place);  // again
  CHECK(wire.notes.said.empty());
  wire.Send(Wire::Of(3, 5), kBytes);
  wire.Send(Wire::Of(4, 5));
  wire.queue.Accept(1, 3, nullptr);  // drops it
  CHECK((wire.notes.News() == Said{"place of 3", "4 in 5"}));
  CHECK(wire.queue.messages(1) == 4 && wire.queue.bytes(1) == kBytes);
}

TEST_CASE("a large payload is fetched once it has a destination, or dropped") {
  Wire wire;
  Remote wanted, unwanted;
  char place[kBytes];
  wire.Offer(Wire::Of(0), wanted);
  wire.Send(Wire::Of(1));
  CHECK(wanted.fetches == 0);
  wire.queue.Accept(1, 0, place);
  wire.queue.Accept(1, 0, nullptr);  // too late: the payload is being written
  CHECK(wanted.fetches == 1 && wanted.destination == place);
  CHECK((wire.notes.News() == Said{"place of 0"}));
  wanted.done(true);
  CHECK((wire.notes.News() == Said{"0 in 0", "1 in 0"}) && wanted.released);
  wire.Offer(Wire::Of(2), unwanted);
  wire.queue.Accept(1, 2, nullptr);
  CHECK(unwanted.fetches == 0 && unwanted.released);
  wire.notes.place = place;
  Remote at_once;
  wire.Offer(Wire::Of(3), at_once);
  CHECK(at_once.fetches == 1);
}

TEST_CASE("a dropped large payload is released at once, even if its channel waits") {
  Wire wire;
  Remote first, second;
  wire.Offer(Wire::Of(0), first);
  wire.Offer(Wire::Of(1), second);
  wire.queue.Accept(1, 1, nullptr);
  CHECK(second.released && !first.released);
}

TEST_CASE("a peer is reported lost once, and not while its payload is being written") {
  Wire wire;
  char place[kBytes];
  wire.notes.place = place;
  Remote first, second;
  wire.Offer(Wire::Of(0), first);
  wire.Offer(Wire::Of(1), second);
  wire.notes.News();
  wire.queue.Lose(1, "no power");
  CHECK(wire.queue.lost(1) && !wire.queue.lost(2) && wire.notes.said.empty());
  first.done(true);
  CHECK(wire.notes.said.empty());
  second.done(false);
  CHECK((wire.notes.News() == Said{"1 lost: no power"}));
  wire.queue.Lose(1, "again");
  wire.Send(Wire::Of(2));
  wire.queue.Accept(1, 0, place);
  CHECK(wire.notes.said.empty());
}

TEST_CASE("a failed fetch of a payload loses its sender") {
  Wire wire;
  char place[kBytes];
  wire.notes.place = place;
  Remote remote;
  wire.Offer(Wire::Of(0), remote);
  wire.notes.News();
  remote.done(false);
  CHECK((wire.notes.News() == Said{"1 lost: fetching a payload from it failed"}));
}

TEST_CASE("a disconnect is reported after all messages of its sender") {
  Envelope disconnect = Wire::Of(2);
  disconnect.kind = Envelope::kDisconnect;
  Wire wire;
  CHECK(wire.Send(disconnect).process == -1);  // earlier messages are still in flight
  CHECK(!wire.queue.disconnected(1));
  wire.Send(Wire::Of(0), kBytes);  // has no destination yet
  const ReceiveQueue::Disconnect seen = wire.Send(Wire::Of(1, 6));
  CHECK(seen.process == 1 && seen.kind == Envelope::kDisconnect && wire.queue.disconnected(1));
  CHECK((wire.notes.News() == Said{"place of 0", "1 in 6"}));
  CHECK(!wire.queue.lost(1));
  char place[kBytes];
  wire.queue.Accept(1, 0, place);
  CHECK((wire.notes.News() == Said{"0 in 0", "1 lost: it disconnected"}) && wire.queue.lost(1));

  Wire other;  // a payload that is still at a disconnected sender is lost
  Remote remote;
  other.Offer(Wire::Of(0), remote);
  other.Send(Wire::Of(1));
  other.Send(disconnect);
  CHECK((other.notes.News() == Said{"place of 0", "1 lost: it disconnected"}) && remote.released);

  Envelope answer = Wire::Of(77);  // its sequence number is ignored
  answer.kind = Envelope::kDisconnectAck;
  Wire leaving;
  const ReceiveQueue::Disconnect answered = leaving.Send(answer);
  CHECK(answered.process == 1 && answered.kind == Envelope::kDisconnectAck && leaving.notes.said.empty());
  CHECK(!leaving.queue.disconnected(1));
}

TEST_CASE("a muted queue makes no calls, but follows sequence numbers up to the disconnect") {
  Wire wire;
  Remote held, fetched;
  char place[kBytes];
  wire.notes.place = place;
  wire.Offer(Wire::Of(0), fetched);
  wire.notes.place = nullptr;
  wire.Offer(Wire::Of(1, 5), held);
  wire.Send(Wire::Of(3));
  wire.notes.News();
  wire.queue.Mute();
  CHECK(held.released);
  fetched.done(true);
  wire.Send(Wire::Of(2));
  Envelope disconnect = Wire::Of(4);
  disconnect.kind = Envelope::kDisconnect;
  CHECK(wire.Send(disconnect).kind == Envelope::kDisconnect && wire.queue.disconnected(1));
  wire.queue.Accept(1, 1, place);
  wire.queue.Lose(2, "no power");
  CHECK(wire.notes.said.empty());
}

struct LastHeader : Receiver {
  void* OnMessage(const Message&) override { return nullptr; }
  void OnDelivered(const Message& message) override {
    header.assign(static_cast<const char*>(message.header), message.header_bytes);
  }
  void OnPeerLost(int, const std::string&) override {}
  std::string header;
};

TEST_CASE("a header has up to 64 bytes") {
  LastHeader receiver;
  ReceiveQueue queue(&receiver, 0, 2, 9);
  Envelope envelope;
  envelope.token = 9;
  envelope.process = 1;
  envelope.header_bytes = 64;
  std::memset(envelope.header, 'h', 64);
  queue.Arrive(&envelope, envelope.size_bytes(), 0, nullptr, nullptr);
  CHECK(receiver.header == std::string(64, 'h') && queue.rejected() == 0);
  envelope.sequence = 1;
  envelope.header_bytes = 65;
  queue.Arrive(&envelope, sizeof(envelope), 0, nullptr, nullptr);
  CHECK(queue.rejected() == 1);
}

}  // namespace
}  // namespace jaxcomm
