// What a process shows the others of its node: its board, and the memory of its calls.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "../../ffi/transport/node.h"
#include "../../ffi/transport/shared_memory.h"
#include "../check.h"

namespace jaxcomm {
namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Child {
  pid_t pid = -1;
  NodeAddress address;
};

// A process with a node that does nothing. For cases before those that start threads.
Child SpawnNode() {
  int to_parent[2];
  CHECK(pipe(to_parent) == 0);
  Child child;
  child.pid = fork();
  CHECK(child.pid >= 0);
  if (child.pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // also if a check ends the test
    Node node;
    if (!node.Open().ok()) _exit(1);
    Slot& slot = node.board().slots[0];
    slot.memory = 3;  // which it doesn't have
    const NodeAddress address = node.address();
    if (write(to_parent[1], &address, sizeof(address)) != sizeof(address)) _exit(1);
    for (;;) pause();
  }
  CHECK(read(to_parent[0], &child.address, sizeof(child.address)) == sizeof(child.address));
  close(to_parent[0]);
  close(to_parent[1]);
  return child;
}

TEST_CASE("a process is alive until it ends") {
  const Child child = SpawnNode();
  Node node;
  CHECK(node.Open().ok());
  CHECK(node.Find(1) == nullptr);
  CHECK(node.Connect(1, child.address).ok());
  CHECK(node.Connect(1, child.address).ok());  // again: the same peer
  Peer* const peer = node.Find(1);
  CHECK(peer != nullptr && peer->process() == 1 && peer->pid() == child.pid && node.Find(2) == nullptr);
  node.CheckAlive();
  CHECK(peer->alive());
  CHECK(
      Has(peer->BlockOf(peer->board().slots[0]).status().message(), "process 1 points to memory that it doesn't have"));
  CHECK(kill(child.pid, SIGKILL) == 0);
  CHECK(waitpid(child.pid, nullptr, 0) == child.pid);
  CHECK(peer->alive());  // as far as anybody has looked
  node.CheckAlive();
  CHECK(!peer->alive() && !peer->CheckAlive());
  peer->board().Ring();  // its board stays
}

TEST_CASE("a process without stdin connects: its first descriptor is 0") {
  const Child child = SpawnNode();
  const int saved = dup(STDIN_FILENO);  // -1: there is none
  close(STDIN_FILENO);
  {
    Node connecting;
    CHECK(connecting.Connect(1, child.address).ok());
    CHECK(fcntl(STDIN_FILENO, F_GETFD) >= 0);  // the handle on the child
    CHECK(connecting.Find(1)->CheckAlive());
  }
  CHECK(fcntl(STDIN_FILENO, F_GETFD) < 0);
  if (saved >= 0) CHECK(dup2(saved, STDIN_FILENO) == STDIN_FILENO && close(saved) == 0);
  CHECK(kill(child.pid, SIGKILL) == 0 && waitpid(child.pid, nullptr, 0) == child.pid);
}

// Memory that another process can read as far as a page that it can't: the kernel then reads less than it was asked.
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

TEST_CASE("a read from a process is whole or fails") {
  if (!Node::AllowSingleCopy()) return;  // the kernel forbids such reads
  const HalfReadable from;
  std::vector<char> to(2 * from.page);
  const int32_t self = getpid();
  const Piece first{to.data(), from.data, from.page}, second{to.data() + from.page, from.data + from.page, 1};
  const Piece across{to.data(), from.data + from.page - 8, 16};
  CHECK(ReadFromProcess(self, &first, 1) && to[from.page - 1] == 'x' && to[from.page] == 0);
  CHECK(!ReadFromProcess(self, &second, 1));
  CHECK(!ReadFromProcess(self, &across, 1));
  const Piece both[] = {first, second};
  CHECK(!ReadFromProcess(self, both, 2));
  CHECK(ReadFromProcess(self, nullptr, 0));
}

TEST_CASE("Yama's setting decides whether processes may read each other") {
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

TEST_CASE("a read of more pieces than one call takes") {
  if (!Node::AllowSingleCopy()) return;
  constexpr int kPieces = 1500;
  std::vector<int32_t> from(2 * kPieces), to(kPieces, -1);
  for (int i = 0; i < 2 * kPieces; ++i) from[i] = i;
  std::vector<Piece> pieces;
  for (int i = 0; i < kPieces; ++i) {
    pieces.push_back({reinterpret_cast<char*>(&to[i]), reinterpret_cast<const char*>(&from[2 * i]), sizeof(int32_t)});
  }
  CHECK(ReadFromProcess(getpid(), pieces.data(), kPieces));
  for (int i = 0; i < kPieces; ++i) CHECK(to[i] == 2 * i);
  const HalfReadable unreadable;
  for (const int bad : {0, 511, 512, 1023, 1024, kPieces - 1}) {
    std::vector<Piece> some = pieces;
    some[bad].from = unreadable.data + unreadable.page;
    CHECK(!ReadFromProcess(getpid(), some.data(), kPieces));
  }
}

TEST_CASE("a bell that has rung ends the sleep at once, a silent one after its time") {
  using Clock = std::chrono::steady_clock;
  Node node;
  CHECK(node.Open().ok());
  Board& board = node.board();
  const uint32_t silent = board.bell.load();
  board.Ring();  // nobody sleeps: no need for a call of the kernel
  CHECK(board.bell.load() == silent);
  uint32_t seen = board.PrepareToSleep();
  board.Ring();  // between the announcement and the sleep
  const auto began = Clock::now();
  board.Sleep(seen, 60'000'000'000);
  CHECK(Clock::now() - began < std::chrono::seconds(30));
  CHECK(board.sleeping.load() == 0);
  seen = board.PrepareToSleep();
  const auto again = Clock::now();
  board.Sleep(seen, 1'000'000'000);  // a second and no nanoseconds
  CHECK(Clock::now() - again >= std::chrono::seconds(1));
  CHECK(Clock::now() - again < std::chrono::seconds(30));
}

TEST_CASE("boards keep calls and failures") {
  Node node;
  CHECK(node.Open().ok());
  Board& board = node.board();
  // Keys that want the same places: as many as there are, then none.
  int count = 0;
  for (uint64_t i = 1;; ++i, ++count) {
    const uint64_t key = i * Board::kBuckets;
    const int slot = board.Reserve(key);
    if (slot < 0) break;
    board.Publish(slot, key);
    CHECK(board.Find(key) == slot);
  }
  CHECK(count == Board::kWays * Board::kProbes);
  for (const uint64_t i : {1, 20}) {  // of the first and of a later probe
    const uint64_t key = i * Board::kBuckets;
    const int slot = board.Find(key);
    board.Retire(slot);
    CHECK(board.Find(key) < 0 && board.Reserve(key) < 0);
    board.Free(slot);
    CHECK(board.Find(key) < 0 && board.Reserve(key) == slot);
    board.Publish(slot, key);
  }
  CHECK(board.Find(12345) < 0);
  CHECK(!board.FindFailure(7));
  board.AddFailure(7, "seven");
  board.AddFailure(8, std::string(5000, 'x'));
  CHECK(!board.FindFailure(0));  // what is in places that nobody has written
  CHECK(board.FindFailure(7) == "seven");
  CHECK(board.FindFailure(8) == std::string(Board::kFailureWords * 8, 'x'));
  for (int64_t run = 100; run < 100 + Board::kNumFailures; ++run) board.AddFailure(run, "later");
  CHECK(!board.FindFailure(7));
  CHECK(board.FindFailure(100 + Board::kNumFailures - 1) == "later");
  CHECK(!board.FindFailure(0));
  board.AddFailure(200, "eight by");
  board.AddFailure(201, "");
  CHECK(board.FindFailure(200) == "eight by" && board.FindFailure(201) == "");
}

TEST_CASE("memory is cut and used again") {
  Node node;
  CHECK(node.Open().ok());
  std::vector<Block> blocks;
  for (const uint64_t bytes : {1, 4096, 4097, 100000, 5 << 20, 9 << 20, 20 << 20}) {
    for (int i = 0; i < 3; ++i) {
      const Block block = ValueOf(node.Take(bytes));
      CHECK(block.bytes >= bytes);
      std::fill(block.data, block.data + block.bytes, static_cast<char>(blocks.size()));
      blocks.push_back(block);
    }
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    CHECK(blocks[i].data[0] == static_cast<char>(i) && blocks[i].data[blocks[i].bytes - 1] == static_cast<char>(i));
  }
  for (const Block& block : blocks) node.Give(block);
  const uint32_t memories = node.board().num_memories.load();
  for (int i = 0; i < 1000; ++i) {
    node.Give(ValueOf(node.Take(1 + i * 1000)));
  }
  CHECK(node.board().num_memories.load() <= memories + 2);
}

TEST_CASE("what is left of a memory is used for smaller blocks") {
  Node node;
  CHECK(node.Open().ok());
  Block block;
  for (const uint64_t bytes : {4 << 10, 8 << 20, 8 << 20}) block = ValueOf(node.Take(bytes));
  CHECK(block.memory == 1);  // of 16 MiB; the first has 8 MiB left, but for a page
  for (uint64_t bytes = 4 << 20; bytes >= 4 << 10; bytes /= 2) {
    block = ValueOf(node.Take(bytes));
    CHECK(block.memory == 0 && block.bytes == bytes);
    CHECK(block.data == node.MemoryOf(0) + block.offset);  // peers know the offset only
  }
}

TEST_CASE("memory that the system does not have is an error") {
  Node node;
  CHECK(node.Open().ok());
  CHECK(Has(node.Take(uint64_t{1} << 63).status().message(), "no room for 9223372036854775808 bytes"));
  CHECK(node.Take(100).ok());  // the next one is there
}

int NumFiles() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST_CASE("mapped memory needs no descriptor") {
  const auto memory = ValueOf(SharedMemory::Create(4096));
  const int before = NumFiles();
  const auto mapped = ValueOf(SharedMemory::Map(getpid(), memory->fd(), 4096));
  CHECK(NumFiles() == before);
  memory->data()[7] = 'x';
  CHECK(mapped->data()[7] == 'x');
  CHECK(Has(SharedMemory::Map(getpid(), memory->fd(), 8192).status().message(), "is not what was announced"));
  CHECK(NumFiles() == before);
}

TEST_CASE("strangers are refused") {
  Node node, other;
  CHECK(node.Open().ok());
  CHECK(other.Open().ok());
  NodeAddress address = node.address();
  address.token[1] ^= 1;
  CHECK(Has(other.Connect(1, address).message(), "not the one that was announced"));
  address = node.address();
  address.board_fd = 0;
  CHECK(!other.Connect(1, address).ok());
  address.pid = 1 << 30;
  CHECK(Has(other.Connect(1, address).message(), "can't be found"));
  CHECK(other.Connect(1, node.address()).ok());
}

}  // namespace
}  // namespace jaxcomm
