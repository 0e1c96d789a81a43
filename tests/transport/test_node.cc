// A node: control segments of processes, the memory of their calls, and remote reads.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "../../ffi/transport/node.h"
#include "../../ffi/transport/shared_memory.h"
#include "../check.h"
#include "forked_node.h"

namespace jaxcomm {
namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("a process is alive until it ends") {
  const ForkedNode child, other;
  Node node;
  CHECK(node.Open().ok());
  CHECK(node.Find(1) == nullptr && node.Connect(1, child.address).ok() && node.Connect(3, other.address).ok());
  Peer* const peer = node.Find(1);
  CHECK(peer != nullptr && peer->process() == 1 && peer->pid() == child.pid && node.Find(2) == nullptr);
  node.CheckAlive();
  CHECK(peer->alive());
  child.Kill();
  other.Kill();
  CHECK(peer->alive());                        // not checked yet
  CHECK(node.Connect(1, child.address).ok());  // it is known, so nothing is looked up
  node.CheckAlive();
  CHECK(!peer->alive() && !peer->CheckAlive() && !node.Find(3)->alive());
  peer->control_segment().RingDoorbell();  // its control segment stays mapped
}

TEST_CASE("a process without stdin connects, and maps memory: its first descriptor is 0") {
  const ForkedNode child;
  const auto memory = ValueOf(SharedMemory::Create(4096));
  const auto is_free = [] { return fcntl(STDIN_FILENO, F_GETFD) < 0; };
  const int saved = dup(STDIN_FILENO);  // -1: there is none
  close(STDIN_FILENO);
  {
    Node connecting;
    CHECK(connecting.Connect(1, child.address).ok() && !is_free());  // the handle on the child
    CHECK(connecting.Find(1)->CheckAlive());
  }
  CHECK(is_free() && SharedMemory::Map(getpid(), memory->fd(), 4096).ok() && is_free());
  CHECK(ValueOf(SharedMemory::Create(4096))->fd() == 0);
  CHECK(is_free());
  if (saved >= 0) CHECK(dup2(saved, STDIN_FILENO) == STDIN_FILENO && close(saved) == 0);
  child.Kill();
}

// Memory of another process whose second half is not readable: the kernel's read is short.
struct HalfReadable {
  const int64_t page = sysconf(_SC_PAGESIZE);
  char* data = static_cast<char*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  HalfReadable() {
    CHECK(data != MAP_FAILED);
    std::fill(data, data + page, 'x');
    CHECK(mprotect(data + page, page, PROT_NONE) == 0);
  }
  ~HalfReadable() { munmap(data, 2 * page); }
};

TEST_CASE("a read from a process is complete or fails") {
  if (!Node::AllowSingleCopy()) return;  // the kernel forbids such reads
  const HalfReadable from;
  std::vector<char> to(2 * from.page);
  const int32_t self = getpid();
  const RemoteRead first{to.data(), from.data, from.page}, second{to.data() + from.page, from.data + from.page, 1};
  const RemoteRead across{to.data(), from.data + from.page - 8, 16};
  CHECK(ReadFromProcess(self, &first, 1) && to[from.page - 1] == 'x' && to[from.page] == 0);
  CHECK(!ReadFromProcess(self, &second, 1));
  CHECK(!ReadFromProcess(self, &across, 1));
  const RemoteRead both[] = {first, second};
  CHECK(!ReadFromProcess(self, both, 2));
  CHECK(ReadFromProcess(self, nullptr, 0));
}

TEST_CASE("Yama's setting determines whether processes may read each other") {
  const bool allowed = Node::AllowSingleCopy("/nowhere");  // by the rest of the kernel
  char path[] = "/tmp/jaxcomm_test.XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  for (const char scope : {'0', '1', '2', '3'}) {
    CHECK(pwrite(fd, &scope, 1, 0) == 1);
    CHECK(Node::AllowSingleCopy(path) == (allowed && scope <= '1'));
  }
  close(fd);
  unlink(path);
}

TEST_CASE("a read of more ranges than one system call takes") {
  if (!Node::AllowSingleCopy()) return;
  constexpr int kPieces = 1500;
  std::vector<int32_t> from(2 * kPieces), spread;
  for (int i = 0; i < 2 * kPieces; ++i) from[i] = i;
  std::vector<RemoteRead> reads(kPieces);
  // Neighbours at one end or at both are one range.
  for (const auto& [step, gap] : {std::pair{2, 2}, {2, 1}, {1, 1}, {1, 2}}) {
    spread.assign(static_cast<size_t>(gap * kPieces), -1);
    for (int i = 0; i < kPieces; ++i) {
      reads[i] = {reinterpret_cast<char*>(&spread[gap * i]), reinterpret_cast<const char*>(&from[step * i]), 4};
    }
    CHECK(ReadFromProcess(getpid(), reads.data(), kPieces));
    for (int i = 0; i < gap * kPieces; ++i) CHECK(spread[i] == (i % gap == 0 ? step * (i / gap) : -1));
  }
  const HalfReadable unreadable;
  for (const int bad : {0, 511, 512, 1023, 1024, kPieces - 1}) {
    std::vector<RemoteRead> some = reads;
    some[bad].from = unreadable.data + unreadable.page;
    CHECK(!ReadFromProcess(getpid(), some.data(), kPieces));
  }
}

TEST_CASE("the doorbell ends a sleep at once, otherwise the sleep times out") {
  using Clock = std::chrono::steady_clock;
  Node node;
  CHECK(node.Open().ok());
  ControlSegment& control_segment = node.control_segment();
  const uint32_t silent = control_segment.doorbell.load();
  control_segment.RingDoorbell();  // the owner does not sleep: no system call
  CHECK(control_segment.doorbell.load() == silent);
  const auto slept_ms = [&](int64_t max_ms, bool ring) {
    const uint32_t seen = control_segment.PrepareToSleep();
    if (ring) control_segment.RingDoorbell();  // between the announcement and the sleep
    const auto began = Clock::now();
    control_segment.Sleep(seen, max_ms * 1'000'000);
    CHECK(control_segment.sleeping.load() == 0);
    return (Clock::now() - began) / std::chrono::milliseconds(1);
  };
  CHECK(slept_ms(60'000, true) < 30'000);
  for (const int64_t ms : {1000, 50}) {  // a second and no nanoseconds, and the opposite
    const int64_t slept = slept_ms(ms, false);
    CHECK(slept >= ms && slept < 30'000);
  }
}

// The owner reuses one slot as fast as it can.
TEST_CASE("a call in a slot that is reused is seen as a whole or not at all") {
  const auto owned = std::make_unique<ControlSegment>();
  ControlSegment& segment = *owned;
  std::atomic<bool> done{false};
  std::thread owner([&] {
    for (int64_t run = 1; !done.load(); ++run) {
      segment.Free(0);
      segment.slots[0].run_id.store(run);
      segment.slots[0].group.store(static_cast<uint64_t>(run));
      segment.Publish(0, 2 * static_cast<uint64_t>(run) + 1);
    }
  });
  int64_t torn = 0;
  const auto began = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - began < std::chrono::milliseconds(200)) {
    segment.VisitCalls([&](const ControlSegment::Call& call) {
      torn += call.key != 2 * call.group + 1 || call.run_id != static_cast<int64_t>(call.group);
    });
  }
  done.store(true);
  owner.join();
  CHECK(torn == 0);
}

ControlSegment* shared_segment = nullptr;
char* closed_page = nullptr;
const std::string kBefore(1024, 'a'), kAfter(1024, 'b');

// The reader of a failure comes to a page that it cannot read. Before it goes on, the owner replaces the failure.
TEST_CASE("a failure that is replaced while it is read is not seen") {
  constexpr uintptr_t kPage = 4096;
  void* const memory =
      mmap(nullptr, sizeof(ControlSegment), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  shared_segment = new (memory) ControlSegment;
  int64_t run = 0;  // its text is the first one that crosses pages
  const auto at = [&](size_t word) { return reinterpret_cast<uintptr_t>(&shared_segment->failures[run].text[word]); };
  while (at(0) / kPage == at(ControlSegment::kFailureWords - 1) / kPage) ++run;
  for (int64_t i = 0; i < ControlSegment::kNumFailures + run; ++i) shared_segment->AddFailure(i, kBefore);
  CHECK(shared_segment->FindFailure(run) == kBefore);
  closed_page = reinterpret_cast<char*>(at(ControlSegment::kFailureWords - 1) / kPage * kPage);
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {
    CHECK(mprotect(closed_page, kPage, PROT_READ | PROT_WRITE) == 0);
    shared_segment->AddFailure(1000, kAfter);
  };
  CHECK(sigaction(SIGSEGV, &action, &before) == 0 && mprotect(closed_page, kPage, PROT_NONE) == 0);
  CHECK(!shared_segment->FindFailure(run) && shared_segment->FindFailure(1000) == kAfter);
  CHECK(sigaction(SIGSEGV, &before, nullptr) == 0 && munmap(memory, sizeof(ControlSegment)) == 0);
}

TEST_CASE("control segments hold calls and failures") {
  Node node;
  CHECK(node.Open().ok());
  ControlSegment& control_segment = node.control_segment();
  // Keys with the same slots: all of them can be reserved, then no more.
  int count = 0;
  for (uint64_t i = 1;; ++i, ++count) {
    const uint64_t key = i * ControlSegment::kBuckets - 1;  // in the last bucket, then in the first ones
    const int slot = control_segment.Reserve(key);
    if (slot < 0) break;
    CHECK(slot < ControlSegment::kNumSlots);
    control_segment.Publish(slot, key);
    CHECK(control_segment.Find(key) == slot);
  }
  CHECK(count == ControlSegment::kWays * ControlSegment::kProbes);
  for (const uint64_t i : {1, 20}) {  // found by the first and by a later probe
    const uint64_t key = i * ControlSegment::kBuckets - 1;
    const int slot = control_segment.Find(key);
    control_segment.Retire(slot);
    CHECK(control_segment.Find(key) < 0 && control_segment.Reserve(key) < 0);
    control_segment.Free(slot);
    CHECK(control_segment.Find(key) < 0 && control_segment.Reserve(key) == slot);
    control_segment.Publish(slot, key);
  }
  CHECK(control_segment.Find(12345) < 0);
  CHECK(!control_segment.FindFailure(7));
  control_segment.AddFailure(7, "seven");
  control_segment.AddFailure(8, std::string(5000, 'x'));
  CHECK(!control_segment.FindFailure(0));  // the run id in failures that have not been written
  CHECK(control_segment.FindFailure(7) == "seven");
  CHECK(control_segment.FindFailure(8) == std::string(ControlSegment::kFailureWords * 8, 'x'));
  for (int64_t run = 100; run < 100 + ControlSegment::kNumFailures; ++run) control_segment.AddFailure(run, "later");
  CHECK(!control_segment.FindFailure(7));
  CHECK(control_segment.FindFailure(100 + ControlSegment::kNumFailures - 1) == "later");
  CHECK(!control_segment.FindFailure(0));
  control_segment.AddFailure(200, "eight by");
  control_segment.AddFailure(201, "");
  CHECK(control_segment.FindFailure(200) == "eight by" && control_segment.FindFailure(201) == "");
}

TEST_CASE("blocks are allocated and reused") {
  Node node;
  CHECK(node.Open().ok());
  std::vector<Block> blocks;
  for (const uint64_t bytes : {1, 4096, 4097, 100000, 5 << 20, 9 << 20, 20 << 20}) {
    for (int i = 0; i < 3; ++i) {
      const Block block = ValueOf(node.Allocate(bytes));
      CHECK(block.bytes >= bytes);
      std::fill(block.data, block.data + block.bytes, static_cast<char>(blocks.size()));
      blocks.push_back(block);
    }
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    CHECK(blocks[i].data[0] == static_cast<char>(i) && blocks[i].data[blocks[i].bytes - 1] == static_cast<char>(i));
  }
  for (const Block& block : blocks) node.Release(block);
  const uint32_t memories = node.control_segment().num_memories.load();
  for (int i = 0; i < 1000; ++i) {
    node.Release(ValueOf(node.Allocate(1 + i * 1000)));
  }
  CHECK(node.control_segment().num_memories.load() <= memories + 2);
}

TEST_CASE("the rest of a memory is used for smaller blocks") {
  Node node;
  CHECK(node.Open().ok());
  Block block;
  for (const uint64_t bytes : {4 << 10, 8 << 20, 8 << 20}) block = ValueOf(node.Allocate(bytes));
  CHECK(block.memory == 1);  // of 16 MiB; the first has 8 MiB left, but for a page
  for (uint64_t bytes = 4 << 20; bytes >= 4 << 10; bytes /= 2) {
    block = ValueOf(node.Allocate(bytes));
    CHECK(block.memory == 0 && block.bytes == bytes);
    CHECK(block.data == node.MemoryOf(0) + block.offset);  // peers get only the offset
  }
}

TEST_CASE("memory that the system does not have is an error") {
  Node node;
  CHECK(node.Open().ok());
  CHECK(Has(node.Allocate(uint64_t{1} << 63).status().message(), "cannot allocate 9223372036854775808 bytes"));
  CHECK(node.Allocate(100).ok());  // the next allocation succeeds
}

TEST_CASE("a peer has only the memory that it has announced") {
  Node node, peer;
  CHECK(node.Open().ok() && peer.Open().ok());
  CHECK(node.Connect(1, peer.address()).ok());
  Slot slot;
  char next = 0;
  CHECK(Has(node.Find(1)->BlockOf(slot).status().message(), "in memory 0, but has only 0 memories"));
  for (const uint64_t bytes : {9 << 20, 100, 100}) {  // a memory of its own, and two blocks of another one
    const Block block = ValueOf(peer.Allocate(bytes));
    slot.memory = block.memory;
    slot.offset = block.offset;
    block.data[5] = static_cast<char>(++next);
    CHECK(ValueOf(node.Find(1)->BlockOf(slot))[5] == next);
  }
  slot.memory = 2;
  CHECK(Has(node.Find(1)->BlockOf(slot).status().message(), "in memory 2, but has only 2 memories"));
}

// Mappings of anonymous files in this process.
int NumMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:") != std::string::npos;
  return count;
}

TEST_CASE("memory is mapped and unmapped, also after errors; only its owner needs a descriptor") {
  const int files = NumFiles(), mappings = NumMappings();
  for (int i = 0; i < 3; ++i) {
    const auto memory = ValueOf(SharedMemory::Create(4096));
    const auto mapped = ValueOf(SharedMemory::Map(getpid(), memory->fd(), 4096));
    CHECK(NumFiles() == files + 1 && NumMappings() == mappings + 2);
    CHECK(fcntl(memory->fd(), F_GETFD) == FD_CLOEXEC);  // not for the programs that this process starts
    memory->data()[7] = 'x';
    CHECK(mapped->data()[7] == 'x');
    CHECK(Has(SharedMemory::Map(getpid(), memory->fd(), 8192).status().message(),
              "is not a shared memory of jaxcomm with 8192 bytes"));
  }
  const int fd = memfd_create("empty", MFD_CLOEXEC | MFD_ALLOW_SEALING);  // mmap refuses a length of 0
  CHECK(Has(SharedMemory::Map(getpid(), fd, 0).status().message(), "is not a shared memory of jaxcomm"));  // no seals
  CHECK(fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK(Has(SharedMemory::Map(getpid(), fd, 0).status().message(), " cannot be mapped"));
  close(fd);
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limit{};
  CHECK(getrlimit(RLIMIT_AS, &limit) == 0 && pages > 0);
  rlimit low = limit;
  low.rlim_cur = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (16 << 20);
  CHECK(setrlimit(RLIMIT_AS, &low) == 0);
  const auto made = SharedMemory::Create(64 << 20);
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  CHECK(Has(made.status().message(), "shared memory cannot be mapped"));
  CHECK(NumFiles() == files && NumMappings() == mappings);
}

TEST_CASE("processes with another layout, a wrong token or a wrong pid are refused") {
  Node node, other;
  CHECK(node.Open().ok() && other.Open().ok());
  const int files = NumFiles();
  ++node.control_segment().magic;
  CHECK(!other.Connect(1, node.address()).ok());
  --node.control_segment().magic;
  NodeAddress address;
  for (const size_t half : {0, 1}) {
    address = node.address();
    address.token[half] ^= 1;
    CHECK(Has(other.Connect(1, address).message(), "is not the process that published this address"));
  }
  address = node.address();
  address.control_segment_fd = 0;
  CHECK(!other.Connect(1, address).ok());
  address.pid = 1 << 30;
  CHECK(Has(other.Connect(1, address).message(), "cannot be found") && NumFiles() == files);
  CHECK(other.Connect(1, node.address()).ok());
}

}  // namespace
}  // namespace jaxcomm
