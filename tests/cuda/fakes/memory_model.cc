// Threads, words and races of memory_model.h. Threads are fibers, which begin anew in every execution.
//
// Compiled without instrumentation. The programs are compiled with -fsanitize=thread, whose calls end here and not in
// ThreadSanitizer (memory_model_explore.cc): this is how plain accesses are found.
#include "memory_model.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "memory_model_state.h"

namespace memory_model {

Execution* Execution::current = nullptr;

namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xbf58476d1ce4e5b9u;
  return hash ^ (hash >> 29);
}

}  // namespace

Program::Program() {
  const int memory = memfd_create("litmus", 0);
  if (memory < 0 || ftruncate(memory, kBytes) != 0) std::abort();
  const auto map = [&] {
    void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<char*>(at);
  };
  base_ = map();
  alias_ = map();
  close(memory);
}

Program::~Program() {
  munmap(base_, kBytes);
  munmap(alias_, kBytes);
}

char* Program::Take(int64_t bytes, const std::string& name) {
  char* const taken = base_ + used_;
  Name(taken, name);
  used_ += (bytes + 15) / 16 * 16;
  if (used_ > kBytes) std::abort();
  return taken;
}

char* Program::Alias(const void* memory) const { return alias_ + (static_cast<const char*>(memory) - base_); }

void Program::AddBlock(int gpu, unsigned block, unsigned num_threads, std::function<void()> body) {
  for (unsigned thread = 0; thread < num_threads; ++thread) {
    threads_.push_back({{gpu, block, thread}, num_threads, body});
  }
  if (threads_.size() > kMaxThreads) std::abort();
}

std::string Program::NameOf(uintptr_t address) const {
  const auto offset = static_cast<int64_t>(address - reinterpret_cast<uintptr_t>(base_));
  const auto behind = names_.upper_bound(offset);
  if (behind == names_.begin()) return "?";
  const auto& [begin, name] = *std::prev(behind);
  return offset == begin ? name : name + " + " + std::to_string(offset - begin);
}

// ---- Threads ----

void Execution::Main() {
  Execution& execution = *current;
  execution.program.threads()[execution.running].body();
  execution.Leave(ThreadState::kDone);
  std::abort();  // a thread that has ended does not continue
}

void Execution::Leave(ThreadState::Status status) {
  ThreadState& self = threads[running];
  self.status = status;
  if (_setjmp(self.place) == 0) _longjmp(scheduler, 1);
}

void Execution::Resume(size_t thread) {
  ThreadState& next = threads[thread];
  running = thread;
  next.status = ThreadState::kReady;
  in_program = true;
  if (_setjmp(scheduler) == 0) {
    if (next.begun) _longjmp(next.place, 1);
    next.begun = true;
    getcontext(&next.context);
    next.context.uc_stack.ss_sp = stacks[thread];
    next.context.uc_stack.ss_size = kStackBytes;
    next.context.uc_link = nullptr;
    makecontext(&next.context, &Execution::Main, 0);
    setcontext(&next.context);
  }
  in_program = false;
}

void Execution::LeaveForever(ThreadState::Status status) {
  Leave(status);
  std::abort();  // the scheduler never resumes it
}

void Execution::Fault(const std::string& text) {
  fault = text;
  LeaveForever(ThreadState::kFaulty);
}

// ---- Words ----

bool Execution::Includes(Scope scope, size_t thread, size_t other) const {
  const Place& a = program.threads()[Owner(thread)].place;
  const Place& b = program.threads()[Owner(other)].place;
  switch (scope) {
    case kSystem:
      return true;
    case kDevice:
      return a.gpu == b.gpu;
    case kBlock:
      return a.gpu == b.gpu && a.block == b.block;
    default:
      return thread == other;
  }
}

Word& Execution::WordAt(const uint64_t* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  Word& word = words[at];
  if (word.messages.empty()) {
    Message first;
    first.value = *address;
    first.number = word.num_resets++;
    first.key = word.next_key;
    word.address = at;
    word.messages.push_back(std::move(first));
    word.index = word.index >= 0 ? word.index : static_cast<int>(num_words++);
    if (num_words > kMaxWords) std::abort();
  }
  return word;
}

size_t Execution::FirstReadable(const Knowledge& knowledge, const Word& word) const {
  const uint64_t key = knowledge.view[word.index];
  size_t i = 0;
  while (i + 1 < word.messages.size() && word.messages[i].key < key) ++i;
  return i;
}

// Outcomes of an operation, as numbers that FinishOperation understands.
std::vector<int> Execution::Outcomes(size_t thread) {
  ThreadState& self = threads[thread];
  const Operation& operation = self.operation;
  Word& word = WordAt(operation.word);
  const size_t first = FirstReadable(self.knowledge, word);
  std::vector<int> outcomes;
  if (self.expired && operation.kind == Operation::kLoad) {
    for (const auto& [polled, key] : self.polled) {  // time passes without news
      if (polled != &word) continue;
      for (size_t i = 0; i < word.messages.size(); ++i) {
        if (word.messages[i].key == key) return {static_cast<int>(i)};
      }
    }
  }
  for (size_t i = first; i < word.messages.size(); ++i) {
    const bool joined = i + 1 < word.messages.size() && word.messages[i + 1].joined;
    const bool writes = operation.kind == Operation::kStore || operation.kind == Operation::kAdd ||
                        (operation.kind == Operation::kExchange && word.messages[i].value == operation.expected);
    if (!writes || !joined) outcomes.push_back(static_cast<int>(i));
  }
  return outcomes;
}

// Whether a load of `thread` may return a store that another thread has not made yet.
bool Execution::MayGrow(size_t thread, uintptr_t address) const {
  const auto known = knowledge_of_stores.find(address);
  if (known == knowledge_of_stores.end()) return false;
  for (const auto& [writer, count] : known->second) {
    if (writer == thread || threads[writer].status == ThreadState::kDone) continue;
    const auto made = threads[writer].num_stores.find(address);
    if (made == threads[writer].num_stores.end() || made->second < count) return true;
  }
  return false;
}

// Whether the iteration that the running thread has ended will never see news.
bool Execution::IsStuck() const {
  for (const auto& [word, key] : threads[running].polled) {
    if (word->messages.empty() || key < word->messages.back().key || MayGrow(running, word->address)) return false;
  }
  return true;
}

void Execution::CountStore(size_t writer, uintptr_t address) {
  const uint32_t made = ++threads[writer].num_stores[address];
  uint32_t& known = knowledge_of_stores[address][writer];
  if (made > known) {
    known = made;
    learned = true;
  }
}

bool Execution::HasSeveralWriters(const uint64_t* word) const {
  const auto known = knowledge_of_stores.find(reinterpret_cast<uintptr_t>(word));
  return known != knowledge_of_stores.end() && known->second.size() > 1;
}

void Execution::Append(Word& word, size_t after, uint64_t value, Order order, bool joined, size_t writer,
                       Knowledge& knowledge) {
  const bool last = after + 1 == word.messages.size();
  Message message;
  message.value = value;
  message.writer = static_cast<int>(writer);
  message.number = ++num_messages_of[writer];
  message.joined = joined;
  message.key = last ? word.messages[after].key + kKeyStep
                     : word.messages[after].key + (word.messages[after + 1].key - word.messages[after].key) / 2;
  if (!last && message.key == word.messages[after].key) std::abort();
  knowledge.view[word.index] = std::max(knowledge.view[word.index], message.key);
  if (order == kRelease) message.released = std::make_shared<Knowledge>(knowledge);
  if (joined && word.messages[after].released != nullptr) {
    auto both = std::make_shared<Knowledge>(*word.messages[after].released);
    if (message.released != nullptr) both->Join(*message.released);
    message.released = both;
  }
  ++knowledge.clock[writer];
  word.messages.insert(word.messages.begin() + static_cast<std::ptrdiff_t>(after) + 1, std::move(message));
  *reinterpret_cast<uint64_t*>(word.address) = word.messages.back().value;
}

void Execution::Observe(Word& word, size_t index, Order order) {
  ThreadState& self = threads[running];
  const Message& message = word.messages[index];
  self.hash = Mix(Mix(Mix(self.hash, word.address), static_cast<uint64_t>(message.writer + 1)), message.number);
  self.knowledge.view[word.index] = std::max(self.knowledge.view[word.index], message.key);
  if (order == kAcquire && message.released != nullptr) self.knowledge.Join(*message.released);
}

// Runs the operation if it has one outcome for good. Otherwise, the thread continues once an outcome has been chosen.
int Execution::Choose() {
  ThreadState& self = threads[running];
  if (self.operation.kind == Operation::kLoad && !MayGrow(running)) {
    const std::vector<int> outcomes = Outcomes(running);
    if (outcomes.size() == 1) return outcomes[0];
  }
  Leave(ThreadState::kParked);
  return self.outcome;
}

void Execution::Log(const char* what, uintptr_t address, uint64_t value) {
  log.push_back({running, what, address, value});
}

uint64_t Load(const uint64_t* address, Scope scope, Order order) {
  Execution& execution = *Execution::current;
  ThreadState& self = execution.Self();
  execution.AtomicAccess(address, scope, false);
  self.operation = {Operation::kLoad, address};
  const int outcome = execution.Choose();
  Word& word = execution.WordAt(address);
  const uint64_t value = word.messages[outcome].value;
  execution.Observe(word, outcome, order);
  if (!self.expired) self.polled.emplace_back(&word, word.messages[outcome].key);
  execution.Log("loads", word.address, value);
  return value;
}

void Store(uint64_t* address, uint64_t value, Scope scope, Order order) {
  Execution& execution = *Execution::current;
  ThreadState& self = execution.Self();
  execution.AtomicAccess(address, scope, true);
  size_t after = execution.WordAt(address).messages.size() - 1;
  if (execution.HasSeveralWriters(address)) {
    self.operation = {Operation::kStore, address};
    execution.Leave(ThreadState::kParked);
    after = static_cast<size_t>(self.outcome);
    self.hash = Mix(self.hash, after);
  }
  execution.HaveEffect();
  execution.CountStore(execution.running, reinterpret_cast<uintptr_t>(address));
  execution.Log("stores", reinterpret_cast<uintptr_t>(address), value);
  execution.Append(execution.WordAt(address), after, value, order, false, execution.running, self.knowledge);
}

// The message that a read-modify-write of the running thread reads.
size_t Execution::ReadToModify(Operation operation, Scope scope) {
  AtomicAccess(operation.word, scope, true);
  Self().operation = operation;
  Leave(ThreadState::kParked);
  HaveEffect();
  CountStore(running, reinterpret_cast<uintptr_t>(operation.word));
  Word& word = WordAt(operation.word);
  const auto outcome = static_cast<size_t>(Self().outcome);
  Observe(word, outcome, kRelaxed);
  Log("exchanges", word.address, word.messages[outcome].value);
  return outcome;
}

bool CompareExchange(uint64_t* address, uint64_t* expected, uint64_t desired, Scope scope) {
  Execution& execution = *Execution::current;
  const size_t outcome = execution.ReadToModify({Operation::kExchange, address, *expected}, scope);
  Word& word = execution.WordAt(address);
  const uint64_t seen = word.messages[outcome].value;
  const bool equal = seen == *expected;
  *expected = seen;
  if (equal) execution.Append(word, outcome, desired, kRelaxed, true, execution.running, execution.Self().knowledge);
  return equal;
}

uint64_t FetchAdd(uint64_t* address, uint64_t add, Scope scope) {
  Execution& execution = *Execution::current;
  const size_t outcome = execution.ReadToModify({Operation::kAdd, address}, scope);
  Word& word = execution.WordAt(address);
  const uint64_t seen = word.messages[outcome].value;
  execution.Append(word, outcome, seen + add, kRelaxed, true, execution.running, execution.Self().knowledge);
  return seen;
}

// ---- Races ----

// Whether `before` happens before `access`.
bool Execution::Ordered(const Access& before, const Access& access) const {
  const Knowledge& knowledge = KnowledgeOf(access.thread);
  const bool async = access.proxy == kAsyncProxy || before.proxy == kAsyncProxy;
  if (before.proxy != access.proxy || (async && !Includes(kBlock, access.thread, before.thread))) {
    return before.clock <= (async ? knowledge.async_fenced : knowledge.fenced)[before.thread];
  }
  return before.thread == access.thread || before.clock <= knowledge.clock[before.thread];
}

void Execution::CheckRaces(uintptr_t byte, const Access& access) {
  const size_t thread = access.thread;
  for (const Access& before : CellOf(byte).accesses) {
    if ((!access.write && !before.write) || Ordered(before, access)) continue;
    if (before.thread == thread && !before.write) continue;  // the stored value depends on the load
    if (Includes(access.scope, thread, before.thread) && Includes(before.scope, before.thread, thread)) continue;
    const bool atomic = access.scope > kThread && before.scope > kThread;
    const bool ordered = before.clock <= KnowledgeOf(thread).clock[before.thread];
    const bool async = access.proxy == kAsyncProxy || before.proxy == kAsyncProxy;
    Fault("race in " + program.NameOf(byte) + " between " + NameOf(thread) +
          (access.write ? ", which writes, and " : " and ") + NameOf(before.thread) +
          (before.write ? ", which writes" : "") +
          (atomic     ? ": a scope does not include the other thread"
           : !ordered ? ""
           : async    ? ": no async fence between a bulk copy and another access"
                      : ": no alias fence between a multicast and a unicast access"));
  }
}

void Execution::Touch(uintptr_t address, size_t bytes, Access access) {
  access.clock = KnowledgeOf(access.thread).clock[access.thread];
  for (uintptr_t byte = address; byte < address + bytes; ++byte) {
    Cell& cell = CellOf(byte);
    if (cell.execution != number) cell.accesses.clear();
    cell.execution = number;
    CheckRaces(byte, access);
    if (access.write && access.scope == kThread) cell.accesses.clear();
    const auto same = std::find_if(cell.accesses.begin(), cell.accesses.end(), [&](const Access& other) {
      return std::tie(other.thread, other.write, other.proxy, other.scope) ==
             std::tie(access.thread, access.write, access.proxy, access.scope);
    });
    if (same != cell.accesses.end()) {
      *same = access;
    } else {
      cell.accesses.push_back(access);
    }
  }
}

void Execution::Plain(size_t thread, uintptr_t address, size_t bytes, bool write, bool async) {
  const auto base = reinterpret_cast<uintptr_t>(program.base());
  const auto alias_base = reinterpret_cast<uintptr_t>(program.Alias(program.base()));
  const bool alias = address - alias_base < Program::kBytes;
  if (alias) address = address - alias_base + base;
  if (address - base >= Program::kBytes) {
    if (write && !OnStack(address)) Fault("a write outside the program's memory");
    return;
  }
  if (thread == running && write) HaveEffect();
  Touch(address, bytes, {thread, 0, write, async ? kAsyncProxy : alias ? kAliasProxy : kGenericProxy, kThread});
  for (auto word = words.lower_bound(address - 7); word != words.end() && word->first < address + bytes; ++word) {
    if (!write || word->second.messages.empty()) continue;
    word->second.next_key = word->second.messages.back().key + kKeyStep;
    word->second.messages.clear();  // the next atomic access finds the value that is about to be written
  }
}

// ---- Barriers ----

int Execution::Wait(Barrier& barrier, size_t size, int value) {
  ThreadState& self = threads[running];
  HaveEffect();
  barrier.any |= value;
  barrier.knowledge.Join(self.knowledge);
  barrier.waiting.push_back(running);
  if (barrier.waiting.size() < size) {
    Leave(ThreadState::kInBarrier);
    return threads[running].outcome;
  }
  const int any = barrier.any;
  for (const size_t thread : barrier.waiting) {
    ThreadState& mate = threads[thread];
    mate.knowledge = barrier.knowledge;
    ++mate.knowledge.clock[thread];
    mate.outcome = any;
    mate.status = ThreadState::kReady;
  }
  barrier = {};
  return any;
}

std::string Execution::NameOf(size_t thread) const {
  const Place& place = program.threads()[Owner(thread)].place;
  return (thread >= program.threads().size() ? "an operation of " : "") + std::string("thread ") +
         std::to_string(place.thread) + " of block " + std::to_string(place.block) + " of GPU " +
         std::to_string(place.gpu);
}

std::string Execution::Story() const {
  std::string story;
  constexpr size_t kMost = 40;
  for (size_t i = log.size() > kMost ? log.size() - kMost : 0; i < log.size(); ++i) {
    story += "\n  " + NameOf(log[i].thread) + " " + log[i].what + " " + program.NameOf(log[i].address) + ": " +
             std::to_string(log[i].value);
  }
  return story;
}

uint64_t Execution::Hash() const {
  uint64_t hash = 1;
  for (const ThreadState& thread : threads) hash = Mix(hash, Mix(thread.hash, thread.status));
  for (const auto& [address, word] : words) {
    if (!HasSeveralWriters(reinterpret_cast<const uint64_t*>(address))) continue;
    for (const Message& message : word.messages) {
      hash = Mix(Mix(hash, static_cast<uint64_t>(message.writer + 1)), message.number);
    }
  }
  return hash;
}

}  // namespace memory_model
