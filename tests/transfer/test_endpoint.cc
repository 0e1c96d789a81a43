// Endpoints of one process under threads that publish, read, cancel, withdraw and disconnect at random.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "peer.h"
#include "transfer/memory_pool.h"

namespace jaxcomm {
namespace {

constexpr int64_t kCount = 1100000;  // several chunks, and enough to be streamed

Error WaitFor(Endpoint& endpoint, const std::shared_ptr<Call>& call) {
  CHECK(endpoint.Wait(call, kLimitS));
  return endpoint.ErrorOf(call);
}

Exposure Version(int64_t version, std::vector<int32_t>& memory) {
  Exposure exposure;
  exposure.key = "x";
  exposure.version = version;
  exposure.arrays = {ArrayOf(memory)};
  exposure.ready = {true};
  return exposure;
}

// Version 1 of `source`, which `reader` may read.
struct Opened {
  Opened(Endpoint& source, Endpoint& reader, Exposure exposure) : reader(reader) {
    CHECK(source.Expose(std::move(exposure), &id).ok());
    peer = ValueOf(reader.Connect(source.address()));
    const std::shared_ptr<Call> open = reader.Open(peer, "x", 1, 60000);
    CHECK(WaitFor(reader, open).ok());
    lease = open->lease;
  }
  std::shared_ptr<Call> Read(std::vector<int32_t>& into, const Piece& from, const Piece& to) const {
    return reader.Read({{{peer, lease, {from}, {to}}}}, {ArrayOf(into)})[0];
  }

  Endpoint& reader;
  uint64_t id = 0;
  int peer = -1;
  uint64_t lease = 0;
};

// Keeps the reader's thread in a callback, until Leave().
class InCallback {
 public:
  InCallback(Endpoint& reader, Endpoint& source, int peer, int64_t version, std::vector<int32_t>& memory) {
    reader.Then(reader.Watch(peer, "later", version - 1), std::chrono::steady_clock::time_point::max(),
                [this](const Call&) {
                  inside_ = true;
                  WaitUntil([this] { return leave_.load(); });
                  inside_ = false;
                });
    Exposure later = Version(version, memory);
    later.key = "later";
    uint64_t id = 0;
    CHECK(source.Expose(std::move(later), &id).ok());
    WaitUntil([this] { return inside_.load(); });
  }
  void Leave() {
    leave_ = true;
    WaitUntil([this] { return !inside_; });
  }

 private:
  std::atomic<bool> inside_{false}, leave_{false};
};

int64_t Descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

TEST_CASE("an endpoint whose Unix socket is not found costs one descriptor") {
  const std::shared_ptr<Endpoint> source = Make("source", true), reader = Make("reader", true);
  std::string address = source->address();
  address.back() = address.back() == '0' ? '1' : '0';
  const int64_t most = Descriptors() + 20;
  for (int i = 0; i < 40; ++i) reader->Disconnect(ValueOf(reader->Connect(address)));
  WaitUntil([&] { return Descriptors() <= most; });
}

// The writer frees the memory of a version as soon as it is not in use. Readers check each array that they get.
void Churn(bool shared_memory, int rounds) {
  const std::shared_ptr<Endpoint> source = Make("source", shared_memory), reader = Make("reader", shared_memory);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    std::vector<std::pair<uint64_t, std::unique_ptr<std::vector<int32_t>>>> live;
    std::mt19937 random(1);
    for (int32_t version = 1; !stop; ++version) {
      auto memory = std::make_unique<std::vector<int32_t>>(kCount);
      std::iota(memory->begin(), memory->end(), version);  // bytes in other places show
      uint64_t id = 0;
      CHECK(source->Expose(Version(version, *memory), &id).ok());
      live.emplace_back(id, std::move(memory));
      if (live.size() > 1) source->Withdraw(live[live.size() - 2].first, random() % 2 == 0);
      for (auto& [number, old] : live) {
        if (source->InUse(number)) continue;
        std::fill(old->begin(), old->end(), -1);  // a reader that still reads it shows a mix
        old.reset();
      }
      live.erase(std::remove_if(live.begin(), live.end(), [](const auto& each) { return each.second == nullptr; }),
                 live.end());
      std::this_thread::yield();
    }
  });
  std::atomic<int> whole{0};
  std::vector<std::thread> readers;
  for (unsigned seed = 0; seed < 3; ++seed) {
    readers.emplace_back([&, seed] {
      std::mt19937 random(seed);
      int peer = ValueOf(reader->Connect(source->address()));
      for (int round = 0; round < rounds || whole == 0;) {
        const std::shared_ptr<Call> open = reader->Open(peer, "x", kLatest, 5000);
        if (!WaitFor(*reader, open).ok()) continue;  // the writer has not begun
        ++round;
        std::vector<int32_t> into(kCount, 0);
        const Piece piece{0, {{0}, {kCount}}};
        const std::shared_ptr<Call> read = reader->Read({{{peer, open->lease, {piece}, {piece}}}}, {ArrayOf(into)})[0];
        const unsigned action = random() % 8;
        if (action == 0) reader->Cancel(read, {Code::kCancelled, "test"});
        if (action == 1) {
          reader->Disconnect(peer);
          peer = ValueOf(reader->Connect(source->address()));
        }
        if (WaitFor(*reader, read).ok()) {
          for (size_t i = 0; i < into.size(); ++i) CHECK(into[i] == into[0] + static_cast<int32_t>(i) && into[0] > 0);
          ++whole;
        }
        reader->Close(peer, open->lease);
      }
      reader->Disconnect(peer);
    });
  }
  for (std::thread& each : readers) each.join();
  WaitUntil([&] { return source->stats().num_leases == 0; });
  stop = true;
  writer.join();
}

TEST_CASE("readers get whole versions over TCP while others are withdrawn, cancelled and cut off") { Churn(false, 20); }
TEST_CASE("readers get whole versions over shared memory as well") { Churn(true, 20); }
TEST_CASE("many rounds [full]") {
  Churn(false, 2000);
  Churn(true, 2000);
}

TEST_CASE("a read waits for all of its arrays to be ready until its first deadline; a callback runs without the lock") {
  const std::shared_ptr<Endpoint> source = Make("source", true), reader = Make("reader", true);
  std::vector<int32_t> memory(10, 7), into(10);
  Exposure exposure = Version(1, memory);
  exposure.arrays.resize(3, exposure.arrays[0]);
  exposure.ready = {true, false, false};
  const Opened opened(*source, *reader, std::move(exposure));
  const Piece first{0, {{2}, {5}}}, second{1, {{6}, {7}}}, third{2, {{0}, {1}}}, to_second{0, {{6}, {7}}};
  const auto reads = reader->Read({{{opened.peer, opened.lease, {first, second}, {first, to_second}}},
                                   {{opened.peer, opened.lease, {first, third}, {first, to_second}}}},
                                  {ArrayOf(into)});
  std::atomic<bool> called{false};
  reader->Then(reads[0], std::chrono::steady_clock::time_point::max(),
               [&](const Call& call) { called = call.error.ok() && reads[0]->done; });
  const auto now = std::chrono::steady_clock::now();
  for (const int limit_ms : {500'000, 60, 600'000}) {
    reader->Then(reads[1], now + std::chrono::milliseconds(limit_ms), [](const Call&) {});
  }
  CHECK(!reader->Wait(reads[0], 0.05) && into == std::vector<int32_t>(10));
  source->MarkReady(opened.id, 1);
  CHECK(WaitFor(*reader, reads[0]).ok());
  CHECK((into == std::vector<int32_t>{0, 0, 7, 7, 7, 0, 7, 0, 0, 0}));
  WaitUntil([&] { return called.load(); });
  const Error error = WaitFor(*reader, reads[1]);
  CHECK(error.code == Code::kTimeout && error.text == "no answer within the limit of the program");
  reader->Then(reader->Watch(opened.peer, "y", 0), std::chrono::steady_clock::time_point::max(),
               [&](const Call& call) { called = call.error.code != Code::kCancelled; });
  reader->Stop();
  CHECK(!called);
}

// The reader's thread is in a callback until the source has both requests.
TEST_CASE("reads of two leases take turns, after one that is cancelled") {
  const std::shared_ptr<Endpoint> source = Make("source", true), reader = Make("reader", true);
  constexpr int64_t kSize = 4 << 20;
  std::vector<int32_t> memory(kSize, 7), into(2 * kSize);
  const Opened opened(*source, *reader, Version(1, memory));
  const std::shared_ptr<Call> open = reader->Open(opened.peer, "x", 1, 60000);
  CHECK(WaitFor(*reader, open).ok());
  InCallback callback(*reader, *source, opened.peer, 1, memory);
  const Piece from{0, {{0}, {kSize}}}, after{0, {{kSize}, {2 * kSize}}};
  const std::shared_ptr<Call> cancelled = opened.Read(into, from, after);
  const auto reads = reader->Read(
      {{{opened.peer, opened.lease, {from}, {from}}}, {{opened.peer, open->lease, {from}, {after}}}}, {ArrayOf(into)});
  WaitUntil([&] { return source->stats().source.reads == 3; });
  reader->Cancel(cancelled, {Code::kCancelled, "test"});
  callback.Leave();
  CHECK(WaitFor(*reader, reads[0]).ok() && reader->Progress(reads[1]).first > 2 * kSize);
  CHECK(WaitFor(*reader, reads[1]).ok());                                         // it writes there
  CHECK(source->stats().traffic["reader"].shared_memory.sent_bytes < 9 * kSize);  // a part of the cancelled one
  reader->Disconnect(opened.peer);
  WaitUntil([&] { return source->stats().num_leases == 0; });
  CHECK(source->stats().source.expired == 0);
}

// The endpoint's thread is in a callback, so the waiting thread gets the answer of another call.
TEST_CASE("a call ends although the thread that waits for it has no memory") {
  if (std::thread::hardware_concurrency() < 2) return;  // nobody polls
  const std::shared_ptr<Endpoint> source = Make("source", true), reader = Make("reader", true);
  std::vector<int32_t> memory(10, 7);
  const Opened opened(*source, *reader, Version(1, memory));
  InCallback callback(*reader, *source, opened.peer, 1, memory);
  const std::shared_ptr<Call> waits = reader->Watch(opened.peer, "x", 1);
  reader->Then(reader->Open(opened.peer, "x", 1, 5000), std::chrono::steady_clock::time_point::max(),
               [](const Call&) { throw std::bad_alloc(); });
  WaitUntil([&] { return source->stats().source.granted == 2; });
  bool failed = false;
  try {
    reader->Wait(waits, kLimitS);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  callback.Leave();
  CHECK(failed && WaitFor(*reader, waits).code == Code::kLost && reader->ErrorOf(waits).text == "out of memory");
}

// The reader's thread is in a callback meanwhile, so the slots of the shared memory hold a part of the second array.
TEST_CASE("an array that becomes ready late goes before the rest of one after it") {
  const std::shared_ptr<Endpoint> source = Make("source", true), reader = Make("reader", true);
  std::vector<int32_t> memory(4 << 20, 7), into(8 << 20);  // 16 MiB, four times the shared memory
  Exposure exposure = Version(1, memory);
  exposure.arrays.push_back(exposure.arrays[0]);
  exposure.ready = {false, false};
  const Opened opened(*source, *reader, std::move(exposure));
  std::vector<uint32_t> ended;
  std::atomic<int> num_ended{0};
  for (uint32_t array = 0; array < 2; ++array) {
    const int64_t size = 4 << 20, at = array * size;
    const Piece from{array, {{0}, {size}}}, to{0, {{at}, {at + size}}};
    reader->Then(opened.Read(into, from, to), std::chrono::steady_clock::time_point::max(),
                 [&, array](const Call& call) {
                   CHECK(call.error.ok());
                   ended.push_back(array);
                   ++num_ended;
                 });
  }
  WaitUntil([&] { return source->stats().source.reads == 2; });
  InCallback callback(*reader, *source, opened.peer, 1, memory);
  source->MarkReady(opened.id, 1);
  WaitUntil([&] { return source->stats().traffic["reader"].shared_memory.sent_bytes > 0; });
  source->MarkReady(opened.id, 0);
  callback.Leave();
  WaitUntil([&] { return num_ended == 2; });
  CHECK((ended == std::vector<uint32_t>{0, 1}));
}

TEST_CASE("an open with a read that fails counts once") {
  const std::shared_ptr<Endpoint> source = Make("source", true), reader = Make("reader", true);
  std::vector<int32_t> memory(10, 7), into(10);
  uint64_t id = 0;
  CHECK(source->Expose(Version(1, memory), &id).ok());
  const int peer = ValueOf(reader->Connect(source->address()));
  const Piece piece{0, {{0}, {10}}}, outside{0, {{0}, {11}}};
  std::vector<uint64_t> want = reader->stats().failures;
  const auto check = [&](const std::string& key, const Piece& from, const Piece& to, Code code) {
    const std::shared_ptr<Call> open =
        reader->OpenAndRead(peer, key, 1, 5000, "a digest", true, {from}, {to}, {ArrayOf(into)});
    CHECK(WaitFor(*reader, open).code == code);
    CHECK(WaitFor(*reader, open->read).code == code);
    ++want[static_cast<size_t>(code)];
    CHECK(reader->stats().failures == want);
  };
  check("y", piece, piece, Code::kUnknown);
  check("x", piece, outside, Code::kInvalid);
  check("x", {0, {std::vector<int64_t>(1 << 20), std::vector<int64_t>(1 << 20)}}, piece, Code::kInvalid);  // > 16 MiB
  reader->Disconnect(peer);
  check("x", piece, piece, Code::kLost);
}

TEST_CASE("a read goes to the next source that was not disconnected, also later") {
  const std::shared_ptr<Endpoint> reader = Make("reader", false);
  std::vector<int32_t> memory(10, 7), into(10);
  const Piece piece{0, {{0}, {10}}};
  std::vector<std::shared_ptr<Endpoint>> sources;
  std::vector<ReadSource> from;
  for (const char* const name : {"first", "second", "third", "last"}) {
    sources.push_back(Make(name, false));
    Exposure exposure = Version(1, memory);
    exposure.ready = {name[0] == 'l'};
    const Opened opened(*sources.back(), *reader, std::move(exposure));
    from.push_back({opened.peer, opened.lease, {piece}, {piece}});
  }
  InCallback callback(*reader, *sources[3], from[3].peer, 1, memory);  // else its thread would notice
  for (const size_t i : {0, 2}) reader->Disconnect(from[i].peer);
  const std::shared_ptr<Call> read = reader->Read({from}, {ArrayOf(into)})[0];
  callback.Leave();
  WaitUntil([&] { return sources[2]->stats().num_leases == 0; });  // the reader's thread has noticed
  reader->Disconnect(from[1].peer);
  CHECK(WaitFor(*reader, read).ok() && into == memory);
}

TEST_CASE("a page that is used again ends the read") {
  const std::shared_ptr<Endpoint> source = Make("source", false), reader = Make("reader", false);
  std::vector<int32_t> memory(10, 7), into(10);
  std::vector<int64_t> generations = {0, 4};
  Exposure exposure = Version(1, memory);
  exposure.generations = generations.data();
  exposure.expected = {{0, 0}, {1, 4}};
  const Opened opened(*source, *reader, std::move(exposure));
  const Piece piece{0, {{0}, {10}}};
  CHECK(WaitFor(*reader, opened.Read(into, piece, piece)).ok());
  __atomic_store_n(&generations[1], 5, __ATOMIC_RELEASE);
  CHECK(WaitFor(*reader, opened.Read(into, piece, piece)).code == Code::kRevoked);
}

constexpr size_t kTouchedBytes = 64 << 10;
char* touched = nullptr;
int64_t touched_generation = 4;

void UseAgain(int) {
  __atomic_store_n(&touched_generation, 5, __ATOMIC_RELEASE);
  mprotect(touched, kTouchedBytes, PROT_READ);
}

TEST_CASE("a page that is used again while it is packed ends the read") {
  const std::shared_ptr<Endpoint> source = Make("source", false), reader = Make("reader", false);
  touched = MemoryPool::Get().Take(kTouchedBytes);
  std::vector<int32_t> memory, into(10);
  Exposure exposure = Version(1, memory);
  exposure.arrays = {{touched, 4, {10}, {4}, -1, {}}};
  exposure.generations = &touched_generation;
  exposure.expected = {{0, 4}};
  const Opened opened(*source, *reader, std::move(exposure));
  struct sigaction act{};
  act.sa_handler = UseAgain;
  act.sa_flags = static_cast<int>(SA_RESETHAND);
  CHECK(sigaction(SIGSEGV, &act, nullptr) == 0 && mprotect(touched, kTouchedBytes, PROT_NONE) == 0);
  const Piece piece{0, {{0}, {10}}};
  CHECK(WaitFor(*reader, opened.Read(into, piece, piece)).code == Code::kRevoked && touched_generation == 5);
}

// Else an array of a page would keep the memory of a large one.
TEST_CASE("memory is used again for as many bytes, and for no fewer") {
  MemoryPool& pool = MemoryPool::Get();
  char* const large = pool.Take(8 << 20);
  pool.Give(large, 8 << 20);
  char* const small = pool.Take(4096);
  CHECK(small != nullptr && small != large);
  CHECK(pool.Take(8 << 20) == large);
  pool.Give(large, 8 << 20);
  pool.Give(small, 4096);
  std::vector<char*> blocks(5);
  for (char*& block : blocks) block = pool.Take(64 << 20);
  for (char* const block : blocks) pool.Give(block, 64 << 20);
  for (char* const block : blocks) {
    unsigned char resident = 0;
    CHECK((mincore(block, 4096, &resident) == 0) == (block != blocks[0]));  // 256 MiB stay
  }
}

}  // namespace
}  // namespace jaxcomm
