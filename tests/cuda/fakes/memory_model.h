// Runs a small program under a relaxed memory model, in every way that the model allows.
//
// The model is the release-acquire-relaxed fragment of C++11 with PTX's scopes and proxies. Each atomic word keeps the
// history of its stores. A load may return any store that is not older, in the word's modification order, than one that
// the thread has already observed. An acquire load that reads a release store also joins what the storing thread had
// observed. A store of a word with several writers takes every place in the modification order that is not older than
// what its thread has observed. Two accesses to the same bytes race if at least one of them writes, neither happens
// before the other, and they are not both atomic in scopes that include both threads (PTX: "morally strong"). Accesses
// to the same memory through a unicast and a multicast address are ordered only if an alias fence lies between them in
// causality order (PTX: "proxy-preserved base causality order"). A store through one address after the same thread's
// load through the other counts as ordered, because in the kernels its value depends on the load. Bulk copies access
// memory in the async proxy: an async fence must separate them from accesses in another proxy, and from those of
// another thread block in the same one. The model leaves out the fence that PTX puts behind the end of every bulk copy,
// because that one speaks of the result only, and not of the source.
//
// Left out: load buffering (a load that returns a store that its own thread's later stores have caused), sequentially
// consistent operations and fences other than the alias fence. The headers use none of these orders. Load buffering:
// the protocols poll a word in a loop and store afterwards, and no GPU is known to execute a store before a branch that
// it depends on.
//
// Sources: the model of C++11, Batty et al., POPL 2011, doi:10.1145/1926385.1926394. Histories and views: Kang et al.,
// POPL 2017, doi:10.1145/3009837.3009850. Scopes and causality of PTX: Lustig, Sahasrabuddhe and Giroux, ASPLOS 2019,
// doi:10.1145/3297858.3304043; proxies: PTX ISA, "Memory Consistency Model". Races by vector clocks: Flanagan and
// Freund, PLDI 2009, doi:10.1145/1542476.1542490.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace memory_model {

enum Scope { kThread, kBlock, kDevice, kSystem };
enum Order { kRelaxed, kAcquire, kRelease };

// The position of a thread. The host is a GPU of its own.
struct Place {
  int gpu = 0;
  unsigned block = 0, thread = 0;
};

// A program and its memory. Memory begins as it is when the exploration begins. All writes must go to this memory, or
// to the stack of a thread.
class Program {
 public:
  static constexpr int64_t kBytes = 64 << 10;

  Program();
  ~Program();
  Program(const Program&) = delete;

  // Zeroed, at a multiple of 16. `name` is for error texts.
  char* Take(int64_t bytes, const std::string& name);
  // The name of memory from here on.
  void Name(const void* begin, const std::string& name) { names_[static_cast<const char*>(begin) - base_] = name; }
  template <typename T>
  T* Words(int64_t count, const std::string& name) {
    return reinterpret_cast<T*>(Take(count * static_cast<int64_t>(sizeof(T)), name));
  }
  // The other address of memory of this program: that of the multicast object.
  char* Alias(const void* memory) const;

  // `body` runs in each thread of a block.
  void AddBlock(int gpu, unsigned block, unsigned num_threads, std::function<void()> body);

  std::function<std::string()> check;  // after each execution that ends: a fault, or nothing
  bool times_out = false;              // whether waits with a deadline may end without success

  struct Thread {
    Place place;
    unsigned num_threads;  // of its block
    std::function<void()> body;
  };
  const std::vector<Thread>& threads() const { return threads_; }
  // Text such as "pad + 8" for an address in the memory.
  std::string NameOf(uintptr_t address) const;
  char* base() const { return base_; }
  int64_t used() const { return used_; }

 private:
  char* base_ = nullptr;
  char* alias_ = nullptr;
  int64_t used_ = 0;
  std::map<int64_t, std::string> names_;  // where each begins
  std::vector<Thread> threads_;
};

struct Result {
  std::string fault;  // empty if there is none; with the operations that led to it
  uint64_t num_executions = 0;
  bool exhaustive = false;  // false if there were more states than allowed
};

Result Explore(const Program& program, uint64_t max_states = 5'000'000);

// The functions from here on are for the threads of a program.

uint64_t Load(const uint64_t* word, Scope scope, Order order);
void Store(uint64_t* word, uint64_t value, Scope scope, Order order);
// Returns whether the word was `expected`. Relaxed.
bool CompareExchange(uint64_t* word, uint64_t* expected, uint64_t desired, Scope scope);
// Returns what the word was. Relaxed.
uint64_t FetchAdd(uint64_t* word, uint64_t add, Scope scope);

const Program::Thread& Self();
// The blocks of the thread's GPU.
unsigned NumBlocks();
// The barrier of the thread's block. Returns the disjunction of all values.
int Arrive(int value);
// The barrier of a part of the block, with a number that is not 0.
int ArriveGroup(int number, int size, int value);
// Between two kernels of a stream: all threads of a GPU wait for each other.
void EndKernel();
// After an iteration of a loop that has seen no progress. Ends the execution, because another execution, in which the
// loop's loads come later, shows all that could follow; or, if the program times out, lets the time pass.
void Pause();
uint64_t NowNs();
void AliasFence();
void AsyncFence();
// Ends the execution and the exploration with a fault.
[[noreturn]] void Fail(const char* text);
inline void Require(bool condition, const char* text) {
  if (!condition) Fail(text);
}

// An operation of a network card (NIC), which the calling thread posts, or `async` a bulk copy. It happens after the
// thread's earlier operations, and in parallel with its later ones.
class NicOperation {
 public:
  explicit NicOperation(bool async = false);
  void Read(const void* from, int64_t bytes) const;
  void Write(void* to, const void* from, int64_t bytes) const;
  // Adds one to a word that only NICs change. Release, system scope; earlier increments are part of it.
  void Increment(uint64_t* word) const;
  // Orders all operations of `other`, or all that came before the increments of `word`, before the later ones of this
  // operation.
  void Follow(const NicOperation& other) const;
  void Follow(const uint64_t* word) const;
  // The calling thread has waited for it.
  void Join() const;
  // Whether the calling thread has observed its end. Then another operation may get its number.
  bool Retire() const;

 private:
  size_t id_ = 0;
  uint32_t clock_ = 0;  // of its accesses
  bool async_;
};

// Bulk copies of the calling thread. The end of a load is an increment of `phase`, those of stores are waited for.
void LoadBulk(void* stage, const void* from, int64_t bytes, uint64_t* phase);
void StoreBulk(void* to, const void* stage, int64_t bytes);
void WaitForBulkReads(size_t most);  // of all stores but the last `most`
void WaitForStores();

}  // namespace memory_model

namespace fake {

// Outside of a program, called before each plain read of code that is compiled with -fsanitize=thread, unless it is
// null or runs already.
using ReadObserver = void (*)(const void* address, size_t bytes);
extern ReadObserver read_observer;

}  // namespace fake
