// Active messages that arrive before, during and after a call. The test steps the network.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../ffi/cpu/active_messages.h"
#include "../check.h"
#include "../transport/memory_network.h"

namespace jaxcomm {
namespace {

constexpr uint64_t kKey = 11;
constexpr Fingerprint kFingerprint(7, 5), kOtherTable(7, 6);
constexpr int64_t kSmall = 16, kLarge = 100'000;  // bytes of an eager payload and of a fetched one

// A call that records its messages.
struct Notes : MessageHandler {
  std::vector<std::string> said;
  std::vector<char> buffer = std::vector<char>(2 * kLarge, '-');
  std::function<void()> meanwhile;  // while it looks for a destination

  void* DestinationOf(int32_t, const Fingerprint& fingerprint, int32_t rank, Space space, int64_t offset_bytes,
                      int64_t bytes) override {
    said.push_back("place of " + std::to_string(bytes) + " for rank " + std::to_string(rank));
    if (meanwhile) meanwhile();
    CHECK(space == Space::kScratch && offset_bytes + bytes <= static_cast<int64_t>(buffer.size()));
    return fingerprint == kFingerprint ? buffer.data() + offset_bytes : nullptr;
  }
  void OnPutDone() override { said.push_back("landed"); }
  void OnSignal(int32_t from, int32_t to) override {
    said.push_back("signal from " + std::to_string(from) + " to " + std::to_string(to));
  }
  void OnEntered(int32_t process, const Fingerprint& fingerprint, const std::string& what) override {
    CHECK(fingerprint == kFingerprint);
    said.push_back(std::to_string(process) + " entered with " + what);
  }
  void OnExited(int32_t process, const Fingerprint& fingerprint, const std::string& what) override {
    CHECK(fingerprint == kFingerprint);
    said.push_back(std::to_string(process) + " left with " + what);
  }
  void OnAborted(int32_t process, const std::string& why) override {
    said.push_back(std::to_string(process) + " aborted: " + why);
  }
  void OnLost(int32_t process) override { said.push_back(std::to_string(process) + " lost"); }

  // The records since the last call.
  std::vector<std::string> News() { return std::exchange(said, {}); }
};

using Said = std::vector<std::string>;

struct CountedMessages : ActiveMessages {
  int64_t num_delivered = 0;
  size_t bytes_delivered = 0;

  void OnDelivered(const Message& message) override {
    ++num_delivered;
    bytes_delivered += message.bytes;
    ActiveMessages::OnDelivered(message);
  }
};

struct Processes {
  MemoryFabric fabric{3, {}};
  CountedMessages endpoints[3];

  Processes() {
    for (int p = 0; p < 3; ++p) endpoints[p].SetNetwork(fabric.Attach(p, 42, &endpoints[p]));
    for (int p = 0; p < 3; ++p) {
      for (int q = 0; q < 3; ++q) {
        if (p != q) CHECK(endpoints[p].network()->Connect(q, endpoints[q].network()->address()).ok());
      }
    }
  }
  void Drain() {
    while (fabric.Step()) {
    }
  }
  static Place PlaceOfRank5() {
    Place place;
    place.rank = 5;
    place.space = Space::kScratch;
    return place;
  }
  // To rank 5 of process 1.
  void Put(int from, int64_t bytes, int64_t offset, char letter, Fingerprint fingerprint = kFingerprint,
           uint64_t key = kKey) {
    std::unique_ptr<char[]> data(new char[bytes]);
    std::fill(data.get(), data.get() + bytes, letter);
    endpoints[from].Put(1, key, fingerprint, PlaceOfRank5(), offset, std::move(data), bytes);
  }
};

TEST_CASE("messages that arrive before their call wait and keep their order") {
  for (const int64_t bytes : {kSmall, kLarge}) {
    Processes all;
    all.endpoints[0].SendEntered(1, kKey, kFingerprint, {}, "x");
    all.Put(0, bytes, 8, 'a');
    all.endpoints[0].Signal(1, kKey, 3, 5);
    all.endpoints[0].SendExited(1, kKey, kFingerprint, "x");
    all.endpoints[2].Signal(1, kKey, 4, 5);
    all.endpoints[0].Signal(1, kKey + 1, 1, 2);  // of another call
    all.Drain();
    const auto notes = std::make_shared<Notes>();
    all.endpoints[1].Register(kKey, notes);
    all.Drain();
    Said said = notes->News();
    // The message of another process may come first. The others are in the order of sending.
    CHECK(std::count(said.begin(), said.end(), "signal from 4 to 5") == 1);
    said.erase(std::find(said.begin(), said.end(), "signal from 4 to 5"));
    CHECK((said == Said{"0 entered with x", "place of " + std::to_string(bytes) + " for rank 5", "landed",
                        "signal from 3 to 5", "0 left with x"}));
    CHECK(notes->buffer[7] == '-' && notes->buffer[8] == 'a' && notes->buffer[7 + bytes] == 'a');
    CHECK(notes->buffer[8 + bytes] == '-');
    // Later messages reach the handler directly.
    all.Put(2, bytes, 0, 'b');
    all.Drain();
    CHECK((notes->News() == Said{"place of " + std::to_string(bytes) + " for rank 5", "landed"}));
    CHECK(notes->buffer[0] == 'b' && notes->buffer[bytes - 1] == 'b');
  }
}

TEST_CASE("messages for a call that is over are dropped and delay no others") {
  Processes all;
  const auto notes = std::make_shared<Notes>(), next = std::make_shared<Notes>();
  all.endpoints[1].Register(kKey, notes);
  all.endpoints[1].Register(kKey + 1, next);
  all.endpoints[1].Unregister(kKey);
  for (const int64_t bytes : {kSmall, kLarge}) all.Put(0, bytes, 0, 'a');
  all.endpoints[0].Signal(1, kKey, 3, 5);
  all.endpoints[0].SendEntered(1, kKey, kFingerprint, {}, "psum");
  all.Drain();
  CHECK(all.endpoints[1].OtherCallsOf(0).empty());  // nothing is kept
  CHECK(all.endpoints[1].num_delivered == 2);
  all.endpoints[0].SendAborted(1, kKey, "had enough");
  all.endpoints[0].Signal(1, kKey + 1, 3, 5);
  all.Drain();
  CHECK(notes->said.empty() && notes->buffer[0] == '-' && notes.use_count() == 1);
  CHECK((next->News() == Said{"signal from 3 to 5"}));
  CHECK(all.endpoints[1].num_delivered == 4);  // all but the dropped payloads
  CHECK(all.endpoints[1].bytes_delivered < kLarge);
}

TEST_CASE("a dropped payload is not written, and later messages are delivered") {
  for (const bool early : {true, false}) {
    Processes all;
    const auto notes = std::make_shared<Notes>();
    if (!early) all.endpoints[1].Register(kKey, notes);
    for (const int64_t bytes : {kSmall, kLarge}) all.Put(0, bytes, 0, 'a', kOtherTable);
    all.endpoints[0].Signal(1, kKey, 3, 5);
    all.Drain();
    if (early) all.endpoints[1].Register(kKey, notes);
    all.Drain();
    CHECK((notes->News() == Said{"place of 16 for rank 5", "place of 100000 for rank 5", "signal from 3 to 5"}));
    CHECK(notes->buffer[0] == '-');
  }
}

TEST_CASE("an abort before the call is entered is delivered, its payloads are dropped") {
  Processes all;
  all.Put(0, kLarge, 0, 'a');
  all.Put(2, kLarge, kLarge, 'c');
  all.Drain();
  all.endpoints[0].SendAborted(1, kKey, "had enough");
  all.Drain();
  all.Put(0, kSmall, 0, 'a');  // by a thread that had started before the abort
  all.Put(2, kSmall, 8, 'd');
  all.Drain();
  const auto notes = std::make_shared<Notes>();
  all.endpoints[1].Register(kKey, notes);
  all.Drain();
  CHECK((notes->News() ==
         Said{"0 aborted: had enough", "place of 100000 for rank 5", "place of 16 for rank 5", "landed", "landed"}));
  CHECK(notes->buffer[0] == '-' && notes->buffer[8] == 'd' && notes->buffer[kLarge] == 'c' &&
        notes->buffer[2 * kLarge - 1] == 'c');
}

TEST_CASE("OtherCallsOf names calls that only the other process has entered") {
  Processes all;
  CHECK(all.endpoints[1].OtherCallsOf(0).empty());
  all.Put(0, kSmall, 0, 'a');  // waits, and does not delay the other channel
  all.endpoints[0].SendEntered(1, kKey, kFingerprint, {}, "psum");
  all.endpoints[2].SendEntered(1, kKey, kFingerprint, {}, "pmax");
  all.Drain();
  CHECK(all.endpoints[1].OtherCallsOf(0) == " in psum" && all.endpoints[1].OtherCallsOf(2) == " in pmax");
  all.endpoints[0].SendEntered(1, kKey + 1, kFingerprint, {}, "all_gather");
  all.Drain();
  const std::string both = all.endpoints[1].OtherCallsOf(0);
  CHECK(both == " in psum and in all_gather" || both == " in all_gather and in psum");
  all.endpoints[0].SendAborted(1, kKey, "had enough");
  all.Drain();
  CHECK(all.endpoints[1].OtherCallsOf(0) == " in all_gather" && all.endpoints[1].OtherCallsOf(2) == " in pmax");
  const auto notes = std::make_shared<Notes>();
  all.endpoints[1].Register(kKey + 1, notes);
  CHECK(all.endpoints[1].OtherCallsOf(0).empty());
  for (uint64_t key = 100; key < 110; ++key) {
    all.endpoints[0].SendEntered(1, key, kFingerprint, {}, std::string(250, 'x'));
  }
  all.Drain();
  CHECK(all.endpoints[1].OtherCallsOf(0).size() < 800);  // not all, for a message
}

TEST_CASE("the failure of a run is that of the process which has told it") {
  Processes all;
  all.endpoints[0].SendRunFailed(1, 7, "had enough");
  all.endpoints[2].SendRunFailed(1, 7, "waited for 0");
  all.endpoints[0].SendRunFailed(1, 7, "a second error is none");
  all.endpoints[2].SendRunFailed(1, 8, "another run");
  all.Drain();
  const auto of = [&](int32_t process, int64_t run_id) {
    return all.endpoints[1].FailureOf(process, run_id).value_or("");
  };
  CHECK(of(0, 7) == "had enough" && of(2, 7) == "waited for 0" && of(2, 8) == "another run" && of(0, 8).empty());
  for (int64_t run_id = 100; run_id < 116; ++run_id) all.endpoints[0].SendRunFailed(1, run_id, "later");
  all.Drain();
  CHECK(of(0, 7).empty() && of(2, 8).empty() && of(0, 100) == "later" && of(0, 115) == "later");  // the last 16
}

// test_other_runs.cc has those that are no other run.
TEST_CASE("CallOfOtherRun finds the call of the same group, of two always the same") {
  Processes all;
  for (const uint64_t key : {kKey + 6, kKey + 4, kKey + 2, kKey}) {
    all.endpoints[0].SendEntered(1, key, kFingerprint, {2, key > kKey ? 5u : 6u}, std::to_string(key));
  }
  all.Drain();
  const auto found = all.endpoints[1].CallOfOtherRun(0, {1, 5});
  CHECK(found && found->key == kKey + 2 && found->run_id == 2 && found->what == std::to_string(kKey + 2));
  CHECK(!all.endpoints[1].CallOfOtherRun(2, {1, 5}) && !all.endpoints[1].CallOfOtherRun(0, {1, 7}));
}

TEST_CASE("after the loss of a process, none of its messages waits and none of its payloads is written") {
  Processes all;
  all.endpoints[0].SendEntered(1, kKey + 1, kFingerprint, {}, "psum");
  all.Put(0, kLarge, 0, 'a', kFingerprint, kKey + 1);
  all.endpoints[2].Signal(1, kKey + 1, 4, 5);
  all.Drain();
  const auto notes = std::make_shared<Notes>(), other = std::make_shared<Notes>();
  all.endpoints[1].Register(kKey, notes);
  all.Put(0, kLarge, 0, 'a');
  while (notes->said.empty()) CHECK(all.fabric.Step());  // the payload has a destination and is being fetched
  CHECK(all.endpoints[1].Reachable(0).ok());
  all.fabric.Lose(0);
  all.Drain();
  Said said = notes->News();
  std::sort(said.begin(), said.end());
  CHECK((said == Said{"0 lost", "landed", "place of 100000 for rank 5"}));
  CHECK(!all.endpoints[1].Reachable(0).ok() && all.endpoints[1].Reachable(2).ok());
  CHECK(all.endpoints[1].OtherCallsOf(0).empty());
  all.endpoints[1].Register(kKey + 1, other);
  all.Drain();
  CHECK((other->News() == Said{"signal from 4 to 5"}));  // from the process that is alive
  CHECK(other->buffer[0] == '-');
  all.Put(2, kLarge, 0, 'a', kFingerprint, kKey + 2);
  all.Drain();
  other->meanwhile = [&] {
    all.fabric.Lose(2);
    all.Drain();
  };
  all.endpoints[1].Register(kKey + 2, other);
  said = other->News();
  std::sort(said.begin(), said.end());
  CHECK((said == Said{"2 lost", "2 lost", "landed", "place of 100000 for rank 5"}));  // it has two keys
}

TEST_CASE("a call that cannot wait for a payload drops its sender") {
  Processes all;
  const auto notes = std::make_shared<Notes>(), other = std::make_shared<Notes>();
  all.endpoints[1].Register(kKey, notes);
  all.endpoints[1].Register(kKey + 1, other);
  all.Put(0, kLarge, 0, 'a');
  while (notes->said.empty()) CHECK(all.fabric.Step());
  all.endpoints[1].CancelPuts(*other);  // no payload of this handler is in progress
  all.Put(2, kLarge, 0, 'd', kFingerprint, kKey + 1);
  while (other->said.empty()) CHECK(all.fabric.Step());
  notes->News();
  other->News();
  all.endpoints[1].CancelPuts(*notes);
  all.Put(2, kSmall, kLarge, 'c');
  all.Drain();
  const Said said = notes->News();
  CHECK(std::count(said.begin(), said.end(), "landed") == 2 && std::count(said.begin(), said.end(), "0 lost") == 1);
  CHECK(notes->buffer[0] == '-' && notes->buffer[kLarge] == 'c');
  CHECK(all.endpoints[1].Reachable(0).message() == "its data did not arrive in time" &&
        all.endpoints[1].Reachable(2).ok());
  CHECK(all.endpoints[0].Reachable(1).message() == "the connection was lost");
  // The payload that another process sends for another call still arrives.
  CHECK((other->News() == Said{"0 lost", "landed"}) && other->buffer[kLarge - 1] == 'd');
}

TEST_CASE("an input is sent from its place, and its call keeps it until then") {
  Processes all;
  const auto sender = std::make_shared<Notes>(), notes = std::make_shared<Notes>();
  std::string input(kLarge, 'a');
  const auto put = [&](int to, int64_t bytes = kLarge) {
    all.endpoints[0].PutInput(to, kKey, kFingerprint, all.PlaceOfRank5(), 0, input.data(), bytes, sender);
  };
  put(1);
  all.Drain();
  CHECK(sender->News().empty());
  input.assign(kLarge, 'b');  // shows that there is no copy; a call does not do this
  all.endpoints[1].Register(kKey, notes);
  all.Drain();
  CHECK(sender->News() == Said{"landed"} && notes->buffer[0] == 'b' && notes->buffer[kLarge - 1] == 'b');
  all.endpoints[0].CancelPuts(*sender);  // nothing is in progress
  put(2);                                // which never enters the call
  put(2, kSmall);                        // but takes this one
  all.Drain();
  CHECK(sender->News() == Said{"landed"});
  all.endpoints[0].CancelPuts(*notes);  // another call
  all.Drain();
  CHECK(sender->News().empty() && all.endpoints[0].Reachable(1).ok() && all.endpoints[0].Reachable(2).ok());
  all.endpoints[0].CancelPuts(*sender);
  all.Drain();
  CHECK(sender->News() == Said{"landed"} && all.endpoints[0].Reachable(1).ok());
  CHECK(all.endpoints[0].Reachable(2).message() == "it did not take its data in time");
  put(2);
  CHECK(sender->News() == Said{"landed"});  // lost: not sent
}

TEST_CASE("the state of aborted calls that are never entered has a limit") {
  Processes all;
  constexpr uint64_t kKept = 1024;
  const auto first = std::make_shared<Notes>(), second = std::make_shared<Notes>(), sender = std::make_shared<Notes>();
  all.endpoints[2].PutInput(1, 100, kFingerprint, all.PlaceOfRank5(), 0, first->buffer.data(), kLarge, sender);
  for (uint64_t key = 100; key <= 100 + kKept; ++key) {
    all.endpoints[0].SendEntered(1, key, kFingerprint, {}, "psum");
    all.endpoints[0].SendAborted(1, key, "had enough");
    all.Drain();
  }
  CHECK(sender->News() == Said{"landed"});  // dropped with the rest
  all.endpoints[1].Register(100, first);
  all.endpoints[1].Register(101, second);
  CHECK(first->said.empty());
  CHECK((second->News() == Said{"0 entered with psum", "0 aborted: had enough"}));
}

TEST_CASE("messages for the most recent calls that are over are dropped") {
  Processes all;
  constexpr uint64_t kKnown = 1 << 14, kForgotten = 2;
  for (uint64_t key = 1; key <= kKnown + kForgotten; ++key) all.endpoints[1].Unregister(key);
  for (uint64_t key = 1; key <= kForgotten + 1; ++key) {
    all.endpoints[0].SendEntered(1, key, kFingerprint, {}, "psum");
    all.Drain();
    const std::string in = all.endpoints[1].OtherCallsOf(0);  // empty if the messages have been dropped
    CHECK(in == (key == 1 ? " in psum" : " in psum and in psum"));
  }
}

// A header of the right size with an unknown kind, and shorter headers: they change nothing.
TEST_CASE("messages with a header of another size are refused") {
  Processes all;
  const auto notes = std::make_shared<Notes>();
  all.endpoints[1].Register(kKey, notes);
  const char header[8] = {};
  std::vector<char> data(kLarge, 'x');
  int sent = 0;
  for (const size_t bytes : {size_t{0}, size_t{kSmall}, size_t{kLarge}}) {
    all.endpoints[0].network()->Send(1, kKey, header, sizeof(header), data.data(), bytes, [&](bool) { ++sent; });
  }
  all.endpoints[0].Signal(1, kKey, 3, 5);
  all.Drain();
  CHECK(sent == 3 && (notes->News() == Said{"signal from 3 to 5"}));
}

}  // namespace
}  // namespace jaxcomm
