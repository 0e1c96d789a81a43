// The state of one execution of a program under memory_model.h.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memory_model.h"

namespace memory_model {

constexpr size_t kMaxThreads = 6;
constexpr size_t kMaxNicOperations = 16;  // per thread
constexpr size_t kMaxClocks = kMaxThreads * (1 + kMaxNicOperations);
constexpr size_t kMaxWords = 64;
constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kKernel = ~0U;  // in place of a block
constexpr uint64_t kKeyStep = uint64_t{1} << 32;

// The operations that a thread has observed.
struct Knowledge {
  using Clocks = std::array<uint32_t, kMaxClocks>;  // by thread
  Clocks clock{};                                   // what happened before
  Clocks fenced{};                                  // what happened before an alias fence that happened before
  Clocks async_fenced{};                            // the same of an async fence
  std::array<uint64_t, kMaxWords> view{};           // by word: the key of the oldest message that it may still read

  void Join(const Knowledge& other) {
    const auto join = [](auto& to, const auto& from) {
      for (size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
    };
    join(clock, other.clock), join(fenced, other.fenced), join(async_fenced, other.async_fenced);
    join(view, other.view);
  }
};

// A store in the history of a word. Keys give the modification order.
struct Message {
  uint64_t key = 0, value = 0;
  int writer = -1;  // -1: the initial value
  uint32_t number = 0;
  bool joined = false;                        // by a read-modify-write to the message before it
  std::shared_ptr<const Knowledge> released;  // null if it releases nothing
};

enum Proxy { kGenericProxy, kAliasProxy, kAsyncProxy };

struct Access {
  size_t thread;
  uint32_t clock;
  bool write;
  Proxy proxy;
  Scope scope;  // kThread: a plain access
};

struct Word {
  uintptr_t address = 0;
  int index = -1;  // in Knowledge::view
  uint32_t num_resets = 0;
  uint64_t next_key = kKeyStep;   // of the first message after a reset
  std::vector<Message> messages;  // in modification order
};

// Accesses of a byte since its last plain write, the last ones of each thread.
struct Cell {
  uint64_t execution = 0;
  std::vector<Access> accesses;
};

struct Operation {
  enum Kind { kLoad, kStore, kExchange, kAdd } kind = kLoad;
  const uint64_t* word = nullptr;
  uint64_t expected = 0;
};

struct ThreadState {
  enum Status { kReady, kParked, kInBarrier, kStuck, kDone, kAbandoned, kFaulty } status = kReady;
  bool begun = false;
  ucontext_t context;
  jmp_buf place;
  Knowledge knowledge;
  Operation operation;
  int outcome = 0;
  uint64_t hash = 0;
  std::vector<std::pair<Word*, uint64_t>> polled;  // loads since the last effect: word and key
  bool effect = false;                             // since its last load that had several outcomes
  bool expired = false;                            // a wait of it ends without success
  uint64_t now_ns = 0;
  size_t num_nic_operations = 0;
  std::vector<NicOperation> bulk_loads;
  std::vector<std::array<NicOperation, 2>> bulk_stores;  // their reads and writes
  std::vector<size_t> free_nic_operations;               // numbers of bulk copies that this thread has seen end
  std::map<uintptr_t, uint32_t> num_stores;
};

struct Barrier {
  std::vector<size_t> waiting;
  int any = 0;
  Knowledge knowledge;
};

struct LogEntry {
  size_t thread;
  const char* what;
  uintptr_t address;
  uint64_t value;
};

// Stores of each thread to each word, over all executions.
using KnownStores = std::map<uintptr_t, std::map<size_t, uint32_t>>;

struct Execution {
  Execution(const Program& program_, KnownStores& known, std::vector<Cell>& cells_, std::vector<char*>& stacks_,
            uint64_t number_)
      : program(program_),
        knowledge_of_stores(known),
        cells(cells_),
        stacks(stacks_),
        number(number_),
        threads(program_.threads().size()) {
    for (size_t i = 0; i < threads.size(); ++i) threads[i].knowledge.clock[i] = 1;
  }

  static Execution* current;
  static void Main();

  // Of the running thread.
  void HaveEffect() {
    Self().polled.clear();
    Self().effect = true;
  }
  void Leave(ThreadState::Status status);
  [[noreturn]] void LeaveForever(ThreadState::Status status);
  [[noreturn]] void Fault(const std::string& text);
  ThreadState& Self() { return threads[running]; }
  void Fence(Knowledge::Clocks Knowledge::* fenced) {
    Self().knowledge.*fenced = Self().knowledge.clock;
    ++Self().knowledge.clock[running];
  }
  int Choose();
  size_t ReadToModify(Operation operation, Scope scope);
  void AtomicAccess(const uint64_t* word, Scope scope, bool write) {
    Touch(reinterpret_cast<uintptr_t>(word), sizeof *word, {running, 0, write, kGenericProxy, scope});
  }
  void Observe(Word& word, size_t index, Order order);
  int Wait(Barrier& barrier, size_t size, int value);
  void Log(const char* what, uintptr_t address, uint64_t value);

  // Of any thread or NIC operation.
  void Plain(size_t thread, uintptr_t address, size_t bytes, bool write, bool async = false);
  void Touch(uintptr_t address, size_t bytes, Access access);
  void CheckRaces(uintptr_t byte, const Access& access);
  bool Ordered(const Access& before, const Access& access) const;
  void Append(Word& word, size_t after, uint64_t value, Order order, bool joined, size_t writer, Knowledge& knowledge);
  void CountStore(size_t writer, uintptr_t address);
  // NIC operations have clocks beyond those of the threads.
  size_t Owner(size_t thread) const {
    return thread < kMaxThreads ? thread : (thread - kMaxThreads) / kMaxNicOperations;
  }
  const Knowledge& KnowledgeOf(size_t thread) const {
    return thread < kMaxThreads ? threads[thread].knowledge : nic_operations.at(thread);
  }

  // Of the scheduler.
  void Resume(size_t thread);
  std::vector<int> Outcomes(size_t thread);
  bool MayGrow(size_t thread, uintptr_t word) const;
  bool MayGrow(size_t thread) const {
    return MayGrow(thread, reinterpret_cast<uintptr_t>(threads[thread].operation.word));
  }
  bool IsStuck() const;
  bool HasSeveralWriters(const uint64_t* word) const;
  uint64_t Hash() const;

  Word& WordAt(const uint64_t* address);
  size_t FirstReadable(const Knowledge& knowledge, const Word& word) const;
  bool Includes(Scope scope, size_t thread, size_t other) const;
  Cell& CellOf(uintptr_t byte) { return cells[byte - reinterpret_cast<uintptr_t>(program.base())]; }
  bool OnStack(uintptr_t address) const {
    const auto stack = reinterpret_cast<uintptr_t>(stacks[running]);
    return address >= stack && address < stack + kStackBytes;
  }
  std::string NameOf(size_t thread) const;
  std::string Story() const;

  const Program& program;
  KnownStores& knowledge_of_stores;
  std::vector<Cell>& cells;  // of the program's memory
  std::vector<char*>& stacks;
  const uint64_t number;
  bool learned = false;  // a new store
  std::vector<ThreadState> threads;
  std::map<size_t, Knowledge> nic_operations;
  std::map<uintptr_t, Word> words;
  size_t num_words = 0;
  std::array<uint32_t, kMaxClocks> num_messages_of{};
  std::map<std::tuple<int, unsigned, int>, Barrier> barriers;  // by GPU, block or kKernel, and number within the block
  std::vector<LogEntry> log;
  size_t running = 0;
  bool in_program = false;
  jmp_buf scheduler;
  std::string fault;
};

}  // namespace memory_model
