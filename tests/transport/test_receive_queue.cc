// Order and destinations of incoming messages, one by one. The test acts as the network.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/transport/receive_queue.h"
#include "../check.h"
#include "../cpu/standard_error.h"

namespace jaxcomm {
namespace {

constexpr uint64_t kToken = 42;
constexpr size_t kBytes = 100;

using Calls = std::vector<std::string>;

std::string Header() { return "abc" + std::string(kMaxHeaderBytes - 3, 'h'); }

// Records its calls, and gives payloads a destination if the test has set one.
struct RecordingReceiver : Receiver {
  Calls calls;
  char* destination = nullptr;

  void* OnMessage(const Message& message) override {
    calls.push_back("destination of " + std::to_string(message.id));
    return destination;
  }
  void OnDelivered(const Message& message) override {
    CHECK(message.process == 1 && message.header_bytes >= 3);
    CHECK(std::memcmp(message.header, Header().data(), message.header_bytes) == 0);
    calls.push_back(std::to_string(message.id) + " in " + std::to_string(message.channel));
  }
  void OnPeerLost(int process, const std::string& why) override {
    calls.push_back(std::to_string(process) + " lost: " + why);
  }
  Calls TakeCalls() { return std::exchange(calls, {}); }
};

// A payload at its sender, and its state.
struct RemoteState {
  int fetches = 0;
  void* destination = nullptr;
  std::function<void(bool)> done;
  bool released = false;
};
struct Payload : RemotePayload {
  explicit Payload(RemoteState& remote) : remote_(remote) {}
  ~Payload() override { remote_.released = true; }
  void Fetch(void* destination, std::function<void(bool)> done) override {
    ++remote_.fetches;
    remote_.destination = destination;
    remote_.done = std::move(done);
  }
  RemoteState& remote_;
};

struct Connection {
  RecordingReceiver receiver;
  ReceiveQueue queue{&receiver, 0, 3, kToken};
  char data[kBytes] = {};

  static Envelope EnvelopeOf(uint64_t sequence, uint64_t channel = 0) {
    Envelope envelope;
    envelope.token = kToken;
    envelope.process = 1;
    envelope.sequence = sequence;
    envelope.channel = channel;
    envelope.header_bytes = 3;
    std::memcpy(envelope.header, Header().data(), kMaxHeaderBytes);
    return envelope;
  }
  ReceiveQueue::Disconnect Send(const Envelope& envelope, size_t bytes = 0) {
    return queue.Arrive(&envelope, envelope.size_bytes(), bytes, bytes > 0 ? data : nullptr, nullptr);
  }
  void SendRemote(const Envelope& envelope, RemoteState& remote) {
    queue.Arrive(&envelope, envelope.size_bytes(), kBytes, nullptr, std::make_unique<Payload>(remote));
  }
};

TEST_CASE("messages are delivered in the order of their numbers") {
  Connection connection;
  Envelope longest = Connection::EnvelopeOf(2, 5);
  longest.header_bytes = 64;
  connection.Send(longest);
  connection.Send(Connection::EnvelopeOf(1, 6), kBytes);
  RemoteState early;
  connection.SendRemote(Connection::EnvelopeOf(3, 8), early);
  CHECK(connection.receiver.calls.empty());
  char place[kBytes];
  connection.receiver.destination = place;
  connection.data[99] = 'x';  // the queue has copied the early message
  connection.Send(Connection::EnvelopeOf(0, 7));
  CHECK(
      (connection.receiver.TakeCalls() == Calls{"0 in 7", "destination of 1", "1 in 6", "2 in 5", "destination of 3"}));
  CHECK(place[99] == 0 && early.destination == place);
}

TEST_CASE("duplicates and messages of other jobs are dropped and counted") {
  Connection connection;
  connection.Send(Connection::EnvelopeOf(0));
  connection.Send(Connection::EnvelopeOf(2));
  connection.receiver.TakeCalls();
  uint64_t refused = 0;
  const auto refuse = [&](const std::function<void(Envelope&)>& change) {
    Envelope envelope = Connection::EnvelopeOf(1);
    change(envelope);
    connection.Send(envelope);
    CHECK(connection.queue.rejected() == ++refused && connection.receiver.calls.empty());
  };
  refuse([](Envelope& e) { e.sequence = 0; });  // already delivered
  refuse([](Envelope& e) { e.sequence = 2; });  // already held
  refuse([](Envelope& e) { e.token ^= 1; });
  refuse([](Envelope& e) { e.process = 0; });  // this process itself
  refuse([](Envelope& e) { e.process = -1; });
  refuse([](Envelope& e) { e.process = 3; });
  refuse([](Envelope& e) { e.header_bytes = 65; });
  const Envelope whole = Connection::EnvelopeOf(1);
  for (const size_t bytes :
       {size_t{0}, offsetof(Envelope, header) - 1, whole.size_bytes() - 1, whole.size_bytes() + 1}) {
    connection.queue.Arrive(&whole, bytes, 0, nullptr, nullptr);
    CHECK(connection.queue.rejected() == ++refused && connection.receiver.calls.empty());
  }
  connection.Send(whole);
  CHECK((connection.receiver.TakeCalls() == Calls{"1 in 0", "2 in 0"}) && connection.queue.rejected() == refused);
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
  const auto dropped = [](ReceiveQueue& queue, int num_refused) {
    const StandardError standard_error;
    for (int i = 0; i < num_refused; ++i) queue.Arrive("x", 1, 0, nullptr, nullptr);
    if (num_refused == 0) queue.Mute();
    return Dropped(standard_error.text());
  };
  RecordingReceiver receiver;
  using Duration = ReceiveQueue::Clock::duration;
  ReceiveQueue usual(&receiver, 0, 3, kToken), once(&receiver, 0, 3, kToken, Duration::max());
  ReceiveQueue always(&receiver, 0, 3, kToken, Duration::zero());
  CHECK((dropped(once, 3) == std::vector<int>{1}));  // even if the clock has just started
  CHECK((dropped(usual, 3) == std::vector<int>{1}) && (dropped(usual, 0) == std::vector<int>{3}));
  CHECK((dropped(always, 3) == std::vector<int>{1, 2, 3}) && dropped(always, 0).empty());
}

TEST_CASE("a payload without a destination delays only its channel") {
  Connection connection;
  connection.data[0] = 'x';
  connection.Send(Connection::EnvelopeOf(0, 5), kBytes);
  connection.Send(Connection::EnvelopeOf(1, 5));
  connection.Send(Connection::EnvelopeOf(2, 6));
  CHECK((connection.receiver.TakeCalls() == Calls{"destination of 0", "2 in 6"}));
  char place[kBytes] = {};
  connection.data[0] = 'y';              // the network reuses its buffer
  connection.queue.Accept(1, 7, place);  // no such message
  connection.queue.Accept(1, 1, place);  // it has no payload
  CHECK(connection.receiver.calls.empty());
  connection.queue.Accept(1, 0, place);
  CHECK(place[0] == 'x' && (connection.receiver.TakeCalls() == Calls{"0 in 5", "1 in 5"}));
  connection.queue.Accept(1, 0, place);  // again
  CHECK(connection.receiver.calls.empty());
  connection.Send(Connection::EnvelopeOf(3, 5), kBytes);
  connection.Send(Connection::EnvelopeOf(4, 5));
  connection.queue.Accept(1, 3, nullptr);  // drops it
  CHECK((connection.receiver.TakeCalls() == Calls{"destination of 3", "4 in 5"}));
}

TEST_CASE("a large payload is fetched once it has a destination, or dropped, or its sender is lost") {
  Connection connection;
  RemoteState wanted, unwanted;
  char place[kBytes];
  connection.SendRemote(Connection::EnvelopeOf(0), wanted);
  connection.Send(Connection::EnvelopeOf(1));
  CHECK(wanted.fetches == 0);
  connection.queue.Accept(1, 0, place);
  connection.queue.Accept(1, 0, nullptr);  // too late: the payload is being written
  CHECK(wanted.fetches == 1 && wanted.destination == place);
  CHECK((connection.receiver.TakeCalls() == Calls{"destination of 0"}));
  wanted.done(true);
  CHECK((connection.receiver.TakeCalls() == Calls{"0 in 0", "1 in 0"}) && wanted.released);
  connection.SendRemote(Connection::EnvelopeOf(2), unwanted);
  connection.queue.Accept(1, 2, nullptr);
  CHECK(unwanted.fetches == 0 && unwanted.released);
  connection.receiver.destination = place;
  RemoteState at_once, behind;
  connection.SendRemote(Connection::EnvelopeOf(3), at_once);
  CHECK(at_once.fetches == 1);
  connection.receiver.destination = nullptr;
  connection.SendRemote(Connection::EnvelopeOf(4), behind);
  connection.queue.Accept(1, 4, nullptr);
  CHECK(behind.released && !at_once.released);  // even if its channel waits
  connection.receiver.TakeCalls();
  at_once.done(false);
  CHECK((connection.receiver.TakeCalls() == Calls{"1 lost: fetching a payload from it failed"}));
}

TEST_CASE("a peer is reported lost once, and not while its payload is being written") {
  Connection connection;
  char place[kBytes];
  connection.receiver.destination = place;
  RemoteState first, second;
  connection.SendRemote(Connection::EnvelopeOf(0), first);
  connection.SendRemote(Connection::EnvelopeOf(1), second);
  connection.receiver.TakeCalls();
  connection.queue.Lose(1, "no power");
  CHECK(connection.queue.lost(1) && !connection.queue.lost(2) && connection.receiver.calls.empty());
  first.done(true);
  CHECK(connection.receiver.calls.empty());
  second.done(false);
  CHECK((connection.receiver.TakeCalls() == Calls{"1 lost: no power"}));
  connection.queue.Lose(1, "again");
  connection.Send(Connection::EnvelopeOf(2));
  connection.queue.Accept(1, 0, place);
  CHECK(connection.receiver.calls.empty());
}

TEST_CASE("a disconnect is reported after all messages of its sender") {
  Envelope disconnect = Connection::EnvelopeOf(2);
  disconnect.kind = Envelope::kDisconnect;
  Connection connection;
  CHECK(connection.Send(disconnect).process == -1);  // earlier messages are still in flight
  CHECK(!connection.queue.disconnected(1));
  connection.Send(Connection::EnvelopeOf(0), kBytes);  // has no destination yet
  const ReceiveQueue::Disconnect seen = connection.Send(Connection::EnvelopeOf(1, 6));
  CHECK(seen.process == 1 && seen.kind == Envelope::kDisconnect && connection.queue.disconnected(1));
  CHECK((connection.receiver.TakeCalls() == Calls{"destination of 0", "1 in 6"}));
  CHECK(!connection.queue.lost(1));
  char place[kBytes];
  connection.queue.Accept(1, 0, place);
  CHECK((connection.receiver.TakeCalls() == Calls{"0 in 0", "1 lost: it disconnected"}) && connection.queue.lost(1));

  Connection other;  // a payload that is still at a disconnected sender is lost
  RemoteState remote;
  other.SendRemote(Connection::EnvelopeOf(0), remote);
  other.Send(Connection::EnvelopeOf(1));
  other.Send(disconnect);
  CHECK((other.receiver.TakeCalls() == Calls{"destination of 0", "1 lost: it disconnected"}) && remote.released);

  Connection third;  // a payload that has been fetched stays, behind one that has no destination yet
  RemoteState fetched;
  third.Send(Connection::EnvelopeOf(0), kBytes);
  third.SendRemote(Connection::EnvelopeOf(1), fetched);
  third.queue.Accept(1, 1, place);
  fetched.done(true);
  third.Send(disconnect);
  third.queue.Accept(1, 0, place);
  CHECK((third.receiver.TakeCalls() ==
         Calls{"destination of 0", "destination of 1", "0 in 0", "1 in 0", "1 lost: it disconnected"}));

  Envelope answer = Connection::EnvelopeOf(77);  // its sequence number is ignored
  answer.kind = Envelope::kDisconnectAck;
  Connection leaving;
  const ReceiveQueue::Disconnect answered = leaving.Send(answer);
  CHECK(answered.process == 1 && answered.kind == Envelope::kDisconnectAck && leaving.receiver.calls.empty());
  CHECK(!leaving.queue.disconnected(1));
}

TEST_CASE("a muted queue makes no calls, but follows sequence numbers up to the disconnect") {
  Connection connection;
  RemoteState held, fetched;
  char place[kBytes];
  connection.receiver.destination = place;
  connection.SendRemote(Connection::EnvelopeOf(0), fetched);
  connection.receiver.destination = nullptr;
  connection.SendRemote(Connection::EnvelopeOf(1, 5), held);
  connection.Send(Connection::EnvelopeOf(3));
  connection.receiver.TakeCalls();
  connection.queue.Mute();
  CHECK(held.released);
  fetched.done(true);
  connection.Send(Connection::EnvelopeOf(2));
  Envelope disconnect = Connection::EnvelopeOf(4);
  disconnect.kind = Envelope::kDisconnect;
  CHECK(connection.Send(disconnect).kind == Envelope::kDisconnect && connection.queue.disconnected(1));
  connection.queue.Accept(1, 1, place);
  connection.queue.Lose(2, "no power");
  CHECK(connection.receiver.calls.empty());
}

}  // namespace
}  // namespace jaxcomm
