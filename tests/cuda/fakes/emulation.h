// Runs kernels as plain C++ on the CPU. Every CUDA thread is a fiber, and all fibers of a launch run on one OS thread.
//
// A fiber runs until it reaches a barrier, reads the clock, or polls for a missing signal. The next fiber is chosen at
// random from a seed. Thread blocks therefore run far ahead of each other, and a failure can be reproduced with its
// seed. Time is the number of switches. Under ThreadSanitizer every fiber counts as a thread, and switching orders
// nothing. ThreadSanitizer therefore reports accesses that are separated only by a lucky order of fibers.
//
// Not covered: hardware reordering beyond what data races show, warp primitives other than barriers, PTX.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// swapcontext makes a system call for the signal mask, which takes most of the time of an emulated kernel. longjmp does
// not, but the variant that checks its target must not be used.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || (defined(_FORTIFY_SOURCE) && _FORTIFY_SOURCE > 0)
#define EMULATION_JUMPS 0
#else
#define EMULATION_JUMPS 1
#endif

struct EmulatedIndex {
  unsigned x = 0, y = 0;
};

namespace emulation {

// The barrier of a thread block. The count orders accesses of its threads before the barrier with accesses after it.
struct Barrier {
  int arrived = 0;  // arrivals at the current barrier
  int any = 0;      // __syncthreads_or: result of the current barrier so far
  int result = 0;   // result of the last barrier
  uint64_t round = 0;
  uint64_t num_ended = 0;  // in the barrier of the block: rounds of all of the block's barriers
};
constexpr int kNamedBarriers = 16;  // with that of the block

// Bulk copies of a thread that are under way: bulk_copies.h.
struct BulkCopies {
  struct Load {
    void* stage;
    const void* from;
    int32_t bytes;
    uint64_t* barrier;
  };
  struct Store {
    void* to;
    const void* stage;
    int32_t bytes;
    std::vector<char> read;  // what the stage had when it was read
  };
  std::vector<Load> loads;
  std::vector<Store> stores;
  bool fenced = false;        // no barrier of threads since the last fence between the proxies
  bool unfenced = false;      // bulk copies since the last fence that followed their end
  bool new_barriers = false;  // mbarriers since the last fence for shared memory
};

struct Fiber {
  ucontext_t context;  // for the start of the fiber
#if EMULATION_JUMPS
  jmp_buf place;  // for its continuation
#endif
  char* stack = nullptr;
  void* sanitizer = nullptr;
  EmulatedIndex thread, block, block_dim, grid_dim;
  Barrier* barriers = nullptr;  // that of the block, 15 named ones, and one per warp
  char* shared = nullptr;
  enum State { kReady, kPaused, kBlocked, kDone } state = kReady;
  const std::function<void()>* body = nullptr;
  bool started = false;
  bool fenced = false;     // no barrier since the last fence between aliases
  bool multicast = false;  // accesses to a multicast object since the last fence
  BulkCopies bulk;
};

constexpr int kWarpThreads = 2;       // small, so that blocks of few threads have several warps
constexpr int64_t kMostUnits = 1024;  // of row_loops.cuh: rows of the tests have fewer

constexpr size_t kStackBytes = 128 << 10;

// Time limit of a launch: ten times that of the longest launch that ends.
constexpr uint64_t kEndlessNs = 2'000'000'000;

// State shared by the fibers of a launch and the scheduler, which never runs while a fiber does. Each OS thread has its
// own state: a launch stays on the thread that made it.
struct Machine {
#if EMULATION_JUMPS
  jmp_buf scheduler;
#else
  ucontext_t scheduler;
#endif
  void* sanitizer = nullptr;
  Fiber* current = nullptr;  // null while none runs
  bool yields = false;       // to other OS threads that run launches which this launch waits for
  uint64_t now_ns = 0;
  uint64_t switch_ns = 100;  // duration of a switch
  uint64_t coins = 1;
  bool loses_loads = false;       // bulk copies to shared memory never end
  std::vector<char> trapped;      // whether kernels of the last launch have stopped a GPU, by blockIdx.y
  const void* counted = nullptr;  // a word whose atomic loads are counted
  uint64_t num_loads = 0;
};

inline Machine& TheMachine() {
  static thread_local Machine machine;
  return machine;
}

// Switching passes the fields of Machine, Fiber and Barrier on. ThreadSanitizer must not take that for synchronisation.
#if defined(__SANITIZE_THREAD__)
#define EMULATION_UNCHECKED __attribute__((no_sanitize("thread"), noinline, unused))
#else
#define EMULATION_UNCHECKED inline
#endif

EMULATION_UNCHECKED static Fiber& Current() { return *TheMachine().current; }

EMULATION_UNCHECKED static void SwitchToScheduler(Fiber::State state) {
  Fiber& self = Current();
  self.state = state;
#if defined(__SANITIZE_THREAD__)
  // The last switch of a fiber orders its accesses before everything after the launch.
  __tsan_switch_to_fiber(TheMachine().sanitizer, state == Fiber::kDone ? 0 : __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(state == Fiber::kDone ? nullptr : &fake, nullptr, 0);
#endif
#if EMULATION_JUMPS
  if (_setjmp(self.place) == 0) _longjmp(TheMachine().scheduler, 1);
#else
  swapcontext(&self.context, &TheMachine().scheduler);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

EMULATION_UNCHECKED static void Pause() { SwitchToScheduler(Fiber::kPaused); }

// Other fibers run before a fiber gets the time, so its earlier observations are out of date.
EMULATION_UNCHECKED static uint64_t NowNs() {
  if (TheMachine().current != nullptr) Pause();
  return ++TheMachine().now_ns;
}

// The kernel runs to its end. The fake of the GPU refuses later work.
EMULATION_UNCHECKED static void Trap() {
  if (TheMachine().current != nullptr) TheMachine().trapped.data()[Current().block.y] = 1;
}

// Random choice where hardware may behave in either way.
EMULATION_UNCHECKED static bool FlipCoin() {
  uint64_t& coins = TheMachine().coins;
  coins = coins * 6364136223846793005u + 1442695040888963407u;
  return (coins >> 63) != 0;
}

EMULATION_UNCHECKED static void CountLoad(const void* word) { TheMachine().num_loads += word == TheMachine().counted; }

enum thread_scope { thread_scope_thread, thread_scope_block, thread_scope_device, thread_scope_system };
enum memory_order {
  memory_order_relaxed = __ATOMIC_RELAXED,
  memory_order_acquire = __ATOMIC_ACQUIRE,
  memory_order_release = __ATOMIC_RELEASE
};

// Stands for cuda::atomic_ref. Scopes have no effect here; litmus.h checks them.
template <typename T, thread_scope>
class atomic_ref {
 public:
  explicit atomic_ref(T& word) : word_(&word) {}
  T load(memory_order order) const {
    CountLoad(word_);
    return __atomic_load_n(word_, order);
  }
  void store(T value, memory_order order) const { __atomic_store_n(word_, value, order); }
  bool compare_exchange_strong(T& expected, T desired, memory_order order) const {
    return __atomic_compare_exchange_n(word_, &expected, desired, false, order, order);
  }
  T fetch_add(T value, memory_order order) const { return __atomic_fetch_add(word_, value, order); }

 private:
  T* const word_;
};

// Each word is stored atomically, in either order, and other fibers may run in between.
inline void StorePair(uint64_t* pair, uint64_t first, uint64_t second) {
  const bool turned = FlipCoin();
  __atomic_store_n(pair + turned, turned ? second : first, __ATOMIC_RELAXED);
  Pause();
  __atomic_store_n(pair + !turned, turned ? first : second, __ATOMIC_RELAXED);
}

inline void LoadPair(const uint64_t* pair, uint64_t* first, uint64_t* second) {
  *first = __atomic_load_n(pair, __ATOMIC_RELAXED);
  *second = __atomic_load_n(pair + 1, __ATOMIC_RELAXED);
}

EMULATION_UNCHECKED static void* DynamicShared() { return Current().shared; }

// Aliases: a thread must execute a fence between a barrier and its accesses to a multicast object, and another one
// before the next barrier. A barrier may order these accesses with those of other threads and ranks to the same memory.
EMULATION_UNCHECKED static void FenceAliases() {
  Current().fenced = true;
  Current().multicast = false;
}

[[noreturn]] inline void Abort(const char* why) {
  std::fprintf(stderr, "emulation: %s\n", why);
  std::abort();
}

EMULATION_UNCHECKED static void AccessMulticast() {
  Current().multicast = true;
  if (!Current().fenced) Abort("no fence separates a barrier from an access to a multicast object");
}

EMULATION_UNCHECKED static int ArriveAt(Barrier& barrier, int size, int value, Barrier& block) {
  Fiber& self = Current();
  self.fenced = self.bulk.fenced = false;
  if (self.multicast) Abort("no fence separates an access to a multicast object from a barrier");
  if (self.bulk.unfenced) Abort("no fence separates a bulk copy from a barrier");
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&barrier);
#endif
  barrier.any |= value;
  const uint64_t round = barrier.round;
  if (++barrier.arrived == size) {
    barrier.arrived = 0;
    barrier.result = barrier.any;
    barrier.any = 0;
    ++barrier.round;
    ++block.num_ended;
  }
  while (barrier.round == round) SwitchToScheduler(Fiber::kBlocked);
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&barrier);
#endif
  return barrier.result;
}

EMULATION_UNCHECKED static int Arrive(int value) {
  const Fiber& self = Current();
  return ArriveAt(self.barriers[0], static_cast<int>(self.block_dim.x), value, self.barriers[0]);
}

// The barrier of a named group (1 .. 15) or of a warp (-1 - its number) of `size` threads.
EMULATION_UNCHECKED static int ArriveGroup(int number, int size, int value) {
  Barrier* const barriers = Current().barriers;
  return ArriveAt(barriers[number < 0 ? kNamedBarriers - 1 - number : number], size, value, barriers[0]);
}

EMULATION_UNCHECKED static void Main() {
  Fiber& self = Current();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  (*self.body)();
  if (self.bulk.unfenced) Abort("no fence separates a bulk copy from the end of the kernel");
  SwitchToScheduler(Fiber::kDone);
}

// Stacks are reused, because mapping one takes longer than most launches.
inline std::vector<char*>& Stacks() {
  static thread_local std::vector<char*> stacks;
  return stacks;
}

inline char* TakeStack() {
  if (Stacks().empty()) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) std::abort();
    return static_cast<char*>(stack);
  }
  char* stack = Stacks().back();
  Stacks().pop_back();
  return stack;
}

inline void MakeContext(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, Main, 0);
}

EMULATION_UNCHECKED static void SwitchTo(Fiber& fiber) {
  Machine& machine = TheMachine();
  machine.current = &fiber;
  fiber.state = Fiber::kReady;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.sanitizer, fiber.started ? __tsan_switch_to_fiber_no_sync : 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack, kStackBytes);
#endif
#if EMULATION_JUMPS
  if (_setjmp(machine.scheduler) == 0) {
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
#else
  fiber.started = true;
  swapcontext(&machine.scheduler, &fiber.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  TheMachine().current = nullptr;
  TheMachine().now_ns += TheMachine().switch_ns;
}

EMULATION_UNCHECKED static Fiber::State StateOf(const Fiber& fiber) { return fiber.state; }

EMULATION_UNCHECKED static uint64_t NumEnded(const Barrier& barrier) { return barrier.num_ended; }

// Runs `body` in every thread of a grid of blocks_x * blocks_y blocks, all of which are resident at once. Each block
// has `shared_bytes` of shared memory, which is NaN at first if read as floats.
inline void Launch(unsigned blocks_x, unsigned blocks_y, unsigned threads, uint64_t seed,
                   const std::function<void()>& body, size_t shared_bytes = 0) {
  TheMachine().trapped.assign(blocks_y, 0);
  std::mt19937_64 random(seed);
  const size_t num_blocks = static_cast<size_t>(blocks_x) * blocks_y;
  const size_t num_barriers = kNamedBarriers + (threads + kWarpThreads - 1) / kWarpThreads;
  std::vector<Barrier> barriers(num_blocks * num_barriers);
  std::vector<std::unique_ptr<char[]>> shared;
  std::vector<std::unique_ptr<Fiber>> fibers;
#if defined(__SANITIZE_THREAD__)
  TheMachine().sanitizer = __tsan_get_current_fiber();
#endif
  for (size_t block = 0; block < num_blocks; ++block) {
    shared.emplace_back(new char[shared_bytes]);
    std::memset(shared.back().get(), 0xff, shared_bytes);
    for (unsigned thread = 0; thread < threads; ++thread) {
      auto fiber = std::make_unique<Fiber>();
      fiber->thread = {thread, 0};
      fiber->block = {static_cast<unsigned>(block % blocks_x), static_cast<unsigned>(block / blocks_x)};
      fiber->block_dim = {threads, 1};
      fiber->grid_dim = {blocks_x, blocks_y};
      fiber->barriers = &barriers[block * num_barriers];
      fiber->shared = shared.back().get();
      fiber->body = &body;
      fiber->stack = TakeStack();
      MakeContext(*fiber);
#if defined(__SANITIZE_THREAD__)
      fiber->sanitizer = __tsan_create_fiber(0);
#endif
      fibers.push_back(std::move(fiber));
    }
  }
  // One block at a time gets many turns in a row, so that others fall far behind.
  const uint64_t begin_ns = TheMachine().now_ns;
  std::vector<size_t> running(num_blocks);
  for (size_t block = 0; block < num_blocks; ++block) running[block] = block;
  while (!running.empty()) {
    const size_t at = random() % running.size();
    const size_t first = running[at] * threads;
    bool done = false;
    for (uint64_t stretch = 1 + random() % 8; stretch > 0 && !done; --stretch) {
      done = true;
      bool blocked = true;
      const Barrier& of_block = barriers[running[at] * num_barriers];
      const uint64_t num_ended = NumEnded(of_block);
      const auto offset = static_cast<unsigned>(random() % threads);
      for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = *fibers[first + (i + offset) % threads];
        if (StateOf(fiber) == Fiber::kDone) continue;
        SwitchTo(fiber);
        done = done && StateOf(fiber) == Fiber::kDone;
        blocked = blocked && StateOf(fiber) == Fiber::kBlocked;
      }
      if (blocked && !done && NumEnded(of_block) == num_ended) {
        Abort("a thread block waits in a barrier for threads that have ended");
      }
    }
    if (TheMachine().yields) {
      std::this_thread::yield();
    } else if (TheMachine().now_ns - begin_ns > kEndlessNs) {
      Abort("a launch does not end");
    }
    if (!done) continue;
    running[at] = running.back();
    running.pop_back();
  }
  for (auto& fiber : fibers) {
    Stacks().push_back(fiber->stack);
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(fiber->sanitizer);
#endif
  }
}

// A multicast object: addresses that stand for those of several ranks. There is no memory at these addresses.
struct Multicast {
  char* base = nullptr;
  int64_t bytes = 0;
  std::vector<char*> replicas;
};

inline Multicast& TheMulticast() {
  static Multicast multicast;
  return multicast;
}

inline int NumReplicas(const void* address) {
  const int64_t offset = static_cast<const char*>(address) - TheMulticast().base;
  if (offset < 0 || offset >= TheMulticast().bytes) std::abort();
  return static_cast<int>(TheMulticast().replicas.size());
}

inline void* Replica(void* address, int rank) {
  return TheMulticast().replicas[rank] + (static_cast<char*>(address) - TheMulticast().base);
}

}  // namespace emulation

#include "bulk_copies.h"
#include "cuda_names.h"
