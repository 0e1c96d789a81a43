// The exploration of memory_model.h. Threads are fibers, which begin anew in every execution.
//
// A thread runs alone until an operation of it has several outcomes. Only loads, read-modify-writes and stores of words
// with several writers have: earlier execution of another store only adds to what loads may return, as older stores
// stay readable. When all threads have come to such an operation, the exploration branches over the threads and over
// the outcomes of each, depth first. It stays with the thread until the thread has an effect on others, because loads
// can be delayed without consequences. Two prefixes in which all threads have read the same stores, and words with
// several writers have the same order of stores, continue in the same way, so the second one ends there. The number
// of stores that a thread makes to a word is learned: the exploration begins anew whenever it finds more of them.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "memory_model_state.h"

namespace memory_model {
namespace {

struct Option {
  size_t thread;
  int outcome;
};

// A point at which the exploration branches.
struct Node {
  uint64_t hash = 0;
  std::vector<Option> options;
  size_t next = 0;
  bool goes_on = false;  // the options are those of the thread that has run, which has only loaded since
  bool live = false;     // whether an option led to more than a fruitless iteration of a loop
};

class Explorer {
 public:
  Explorer(const Program& program, uint64_t max_states)
      : program_(program), max_states_(max_states), cells_(Program::kBytes) {
    initial_.assign(program.base(), program.base() + program.used());
    for (size_t i = 0; i < program.threads().size(); ++i) {
      void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (stack == MAP_FAILED) std::abort();
      stacks_.push_back(static_cast<char*>(stack));
    }
  }
  ~Explorer() {
    for (char* stack : stacks_) munmap(stack, kStackBytes);
    std::memcpy(program_.base(), initial_.data(), initial_.size());
  }
  Explorer(const Explorer&) = delete;

  Result Run() {
    do {
      learned_ = false;
      visited_.clear();
      result_.num_executions = 0;
      do {
        RunOnce();
        if (learned_) break;
        if (!result_.fault.empty()) return result_;
        if (visited_.size() > max_states_) return result_;
      } while (BackTrack());
      deadlock_depth_ = SIZE_MAX;
      if (learned_) result_.fault.clear();  // it may be the deadlock of a thread for which no store was expected
      if (!result_.fault.empty()) return result_;
      nodes_.clear();
    } while (learned_);
    result_.exhaustive = true;
    return result_;
  }

 private:
  // Runs all threads until each has ended or has come to an operation with several outcomes.
  bool RunReady(Execution& execution) {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t thread = 0; thread < execution.threads.size(); ++thread) {
        ThreadState& next = execution.threads[thread];
        if (next.status != ThreadState::kReady) continue;
        execution.Resume(thread);
        moved = true;
        if (next.status == ThreadState::kAbandoned) return false;
        if (next.status == ThreadState::kFaulty) {
          result_.fault = execution.fault + execution.Story();
          return false;
        }
      }
    }
    return true;
  }

  void RunOnce() {
    std::memcpy(program_.base(), initial_.data(), initial_.size());
    Execution execution(program_, known_, cells_, stacks_, ++number_);
    Execution::current = &execution;
    RunFrom(execution);
    Execution::current = nullptr;
    learned_ = learned_ || execution.learned;
  }

  void RunFrom(Execution& execution) {
    size_t last = 0;  // the thread that an option has chosen
    for (size_t depth = 0;; ++depth) {
      if (!RunReady(execution)) return;
      const bool goes_on =
          depth > 0 && execution.threads[last].status == ThreadState::kParked && !execution.threads[last].effect;
      if (!goes_on) MarkLive(depth);
      bool done = true, parked = false;
      for (const ThreadState& thread : execution.threads) {
        done = done && thread.status == ThreadState::kDone;
        parked = parked || thread.status == ThreadState::kParked;
      }
      if (done) {
        ++result_.num_executions;
        if (program_.check) result_.fault = program_.check();
        if (!result_.fault.empty()) result_.fault += execution.Story();
        return;
      }
      if (!parked) {
        result_.fault = "deadlock:" + WhoWaits(execution) + execution.Story();
        return;
      }
      if (depth == nodes_.size()) {
        const uint64_t hash = execution.Hash() + (goes_on ? 1 + last : 0);
        const auto [visited, first] = visited_.emplace(hash, false);
        if (goes_on && visited->second) MarkLive(depth);
        if (!first) return;
        nodes_.push_back(MakeNode(execution, goes_on, last));
        nodes_.back().hash = hash;
      }
      if (depth == deadlock_depth_) {
        result_.fault = "deadlock:" + WhoWaits(execution) + execution.Story();
        return;
      }
      const Node& node = nodes_[depth];
      const Option& option = node.options[node.next];
      last = option.thread;
      ThreadState& thread = execution.threads[last];
      thread.outcome = option.outcome;
      thread.status = ThreadState::kReady;
      thread.effect = false;
    }
  }

  // The nodes before `depth` that chose the loads since the last effect of the thread.
  void MarkLive(size_t depth) {
    while (depth > 0) {
      nodes_[--depth].live = true;
      if (!nodes_[depth].goes_on) return;
    }
  }

  std::string WhoWaits(const Execution& execution) const {
    std::string text;
    for (size_t i = 0; i < execution.threads.size(); ++i) {
      const ThreadState& thread = execution.threads[i];
      if (thread.status == ThreadState::kInBarrier) text += "\n  " + execution.NameOf(i) + " waits in a barrier";
      if (thread.status == ThreadState::kParked || thread.status == ThreadState::kStuck) {
        text += "\n  " + execution.NameOf(i) + " waits for " +
                program_.NameOf(reinterpret_cast<uintptr_t>(thread.operation.word));
      }
    }
    return text;
  }

  Node MakeNode(Execution& execution, bool goes_on, size_t last) const {
    Node node;
    node.goes_on = goes_on;
    for (size_t i = 0; i < execution.threads.size(); ++i) {
      if (execution.threads[i].status != ThreadState::kParked || (goes_on && i != last)) continue;
      for (const int outcome : execution.Outcomes(i)) node.options.push_back({i, outcome});
    }
    return node;
  }

  bool BackTrack() {
    while (!nodes_.empty()) {
      Node& node = nodes_.back();
      if (++node.next < node.options.size()) return true;
      visited_[node.hash] = node.live;
      if (!node.live && !node.goes_on && !program_.times_out) {
        node.next = 0;
        deadlock_depth_ = nodes_.size() - 1;
        RunOnce();  // again, for the text
        return false;
      }
      nodes_.pop_back();
    }
    return false;
  }

  const Program& program_;
  const uint64_t max_states_;
  std::vector<Cell> cells_;
  std::vector<char> initial_;
  std::vector<char*> stacks_;
  std::unordered_map<uint64_t, bool> visited_;  // by state: Node::live
  std::vector<Node> nodes_;
  KnownStores known_;
  bool learned_ = false;
  uint64_t number_ = 0;
  size_t deadlock_depth_ = SIZE_MAX;  // of the node that is a deadlock
  Result result_;
};

}  // namespace

Result Explore(const Program& program, uint64_t max_states) { return Explorer(program, max_states).Run(); }

const Program::Thread& Self() { return Execution::current->program.threads()[Execution::current->running]; }

unsigned NumBlocks() {
  unsigned num = 0;
  for (const Program::Thread& thread : Execution::current->program.threads()) {
    if (thread.place.gpu == Self().place.gpu && thread.place.block >= num) num = thread.place.block + 1;
  }
  return num;
}

int Arrive(int value) { return ArriveGroup(0, static_cast<int>(Self().num_threads), value); }

int ArriveGroup(int number, int size, int value) {
  const Place& place = Self().place;
  Execution& execution = *Execution::current;
  return execution.Wait(execution.barriers[{place.gpu, place.block, number}], static_cast<size_t>(size), value);
}

void EndKernel() {
  Execution& execution = *Execution::current;
  const int gpu = Self().place.gpu;
  const auto& threads = execution.program.threads();
  const auto size = std::count_if(threads.begin(), threads.end(), [&](const auto& t) { return t.place.gpu == gpu; });
  execution.Wait(execution.barriers[{gpu, kKernel, 0}], static_cast<size_t>(size), 0);
}

void Pause() {
  Execution& execution = *Execution::current;
  if (!execution.program.times_out) {
    execution.LeaveForever(execution.IsStuck() ? ThreadState::kStuck : ThreadState::kAbandoned);
  }
  execution.Self().expired = true;
}

uint64_t NowNs() {
  constexpr uint64_t kLongNs = uint64_t{1} << 50;
  ThreadState& self = Execution::current->Self();
  if (self.expired) self.now_ns += kLongNs;
  return self.now_ns;
}

void AliasFence() { Execution::current->Fence(&Knowledge::fenced); }
void AsyncFence() { Execution::current->Fence(&Knowledge::async_fenced); }

void Fail(const char* text) { Execution::current->Fault(text); }

NicOperation::NicOperation(bool async) : async_(async) {
  Execution& execution = *Execution::current;
  ThreadState& poster = execution.Self();
  if (!poster.free_nic_operations.empty()) {
    id_ = poster.free_nic_operations.back();
    poster.free_nic_operations.pop_back();
  } else {
    if (poster.num_nic_operations == kMaxNicOperations) std::abort();
    id_ = kMaxThreads + execution.running * kMaxNicOperations + poster.num_nic_operations++;
  }
  Knowledge& knowledge = execution.nic_operations[id_] = poster.knowledge;
  clock_ = ++knowledge.clock[id_];
  ++poster.knowledge.clock[execution.running];
  execution.HaveEffect();
}

void NicOperation::Read(const void* from, int64_t bytes) const {
  Execution::current->Plain(id_, reinterpret_cast<uintptr_t>(from), static_cast<size_t>(bytes), false, async_);
}

void NicOperation::Write(void* to, const void* from, int64_t bytes) const {
  Execution::current->Plain(id_, reinterpret_cast<uintptr_t>(to), static_cast<size_t>(bytes), true, async_);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void NicOperation::Increment(uint64_t* address) const {
  Execution& execution = *Execution::current;
  execution.CountStore(execution.running, reinterpret_cast<uintptr_t>(address));
  Word& word = execution.WordAt(address);
  execution.Append(word, word.messages.size() - 1, word.messages.back().value + 1, kRelease, true, id_,
                   execution.nic_operations[id_]);
}

void NicOperation::Follow(const NicOperation& other) const {
  auto& all = Execution::current->nic_operations;
  all[id_].Join(all[other.id_]);
}

void NicOperation::Follow(const uint64_t* word) const {
  const auto& last = Execution::current->WordAt(word).messages.back();
  if (last.released != nullptr) Execution::current->nic_operations[id_].Join(*last.released);
}

void NicOperation::Join() const { Execution::current->Self().knowledge.Join(Execution::current->nic_operations[id_]); }

bool NicOperation::Retire() const {
  ThreadState& self = Execution::current->Self();
  if (self.knowledge.clock[id_] < clock_) return false;
  self.free_nic_operations.push_back(id_);
  return true;
}

void LoadBulk(void* stage, const void* from, int64_t bytes, uint64_t* phase) {
  const NicOperation load(true);
  load.Read(from, bytes);
  load.Write(stage, from, bytes);
  load.Increment(phase);
  Execution::current->Self().bulk_loads.push_back(load);
}

void StoreBulk(void* to, const void* stage, int64_t bytes) {
  const NicOperation reads(true), writes(true);
  reads.Read(stage, bytes);
  writes.Follow(reads);
  writes.Write(to, stage, bytes);
  Execution::current->Self().bulk_stores.push_back({reads, writes});
}

void WaitForBulkReads(size_t most) {
  const auto& stores = Execution::current->Self().bulk_stores;
  for (size_t i = 0; i + most < stores.size(); ++i) stores[i][0].Join();
}

void WaitForStores() {
  ThreadState& self = Execution::current->Self();
  for (const auto& [reads, writes] : self.bulk_stores) {
    writes.Join();
    reads.Retire();
    writes.Retire();
  }
  self.bulk_stores.clear();
  auto& loads = self.bulk_loads;
  loads.erase(std::remove_if(loads.begin(), loads.end(), [](const auto& load) { return load.Retire(); }), loads.end());
}

}  // namespace memory_model

namespace fake {
ReadObserver read_observer = nullptr;
}

// The calls that -fsanitize=thread puts before plain accesses. Outside of a model, reads go to the observer.
static void Access(void* address, size_t bytes, bool write) {
  memory_model::Execution* const execution = memory_model::Execution::current;
  const bool models = execution != nullptr && execution->in_program;
  if (models) execution->Plain(execution->running, reinterpret_cast<uintptr_t>(address), bytes, write);
  static thread_local bool runs = false;  // the observer reads too
  if (models || write || fake::read_observer == nullptr || runs) return;
  runs = true;
  fake::read_observer(address, bytes);
  runs = false;
}
#define JAXCOMM_HOOKS(bytes)                                                           \
  extern "C" void __tsan_read##bytes(void* at) { Access(at, bytes, false); }           \
  extern "C" void __tsan_write##bytes(void* at) { Access(at, bytes, true); }           \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { Access(at, bytes, false); } \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { Access(at, bytes, true); }
JAXCOMM_HOOKS(1)
JAXCOMM_HOOKS(2)
JAXCOMM_HOOKS(4)
JAXCOMM_HOOKS(8)
JAXCOMM_HOOKS(16)

extern "C" {
void __tsan_read_range(void* address, size_t bytes) { Access(address, bytes, false); }
void __tsan_write_range(void* address, size_t bytes) { Access(address, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  __tsan_read_range(const_cast<void*>(from), bytes);
  __tsan_write_range(to, bytes);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  __tsan_write_range(to, bytes);
  return std::memset(to, value, bytes);
}

// Atomic operations of the emulation, and the counts of shared pointers of the host.
#define JAXCOMM_ATOMICS(bits, type)                                                                                \
  type __tsan_atomic##bits##_load(const volatile type* word, int) { return __atomic_load_n(word, 5); }             \
  void __tsan_atomic##bits##_store(volatile type* word, type value, int) { __atomic_store_n(word, value, 5); }     \
  type __tsan_atomic##bits##_fetch_add(volatile type* word, type value, int) {                                     \
    return __atomic_fetch_add(word, value, 5);                                                                     \
  }                                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* word, type* expected, type desired, int, int) { \
    return __atomic_compare_exchange_n(word, expected, desired, false, 5, 5) ? 1 : 0;                              \
  }
JAXCOMM_ATOMICS(32, int32_t)
JAXCOMM_ATOMICS(64, int64_t)
}
