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
  names_.emplace_back(used_, name);
  char* const taken = base_ + used_;
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
  const std::pair<int64_t, std::string>* found = nullptr;
  for (const auto& name : names_) {
    if (name.first <= offset) found = &name;
  }
  if (found == nullptr) return "?";
  return offset == found->first ? found->second : found->second + " + " + std::to_string(offset - found->first);
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

void Execution::CheckWordRaces(Word& word, Scope scope, bool write) {
  ThreadState& self = threads[running];
  for (const Access& access : word.accesses) {
    if (access.thread == running || (!write && !access.write) || Ordered(access, running, kGenericProxy)) continue;
    if (Includes(scope, running, access.thread) && Includes(access.scope, access.thread, running)) continue;
    Fault("race in " + program.NameOf(word.address) + " between " + NameOf(running) + " and " + NameOf(access.thread) +
          ": a scope does not include the other thread");
  }
  for (uintptr_t byte = word.address; byte < word.address + sizeof(uint64_t); ++byte) {
    CheckPlain(byte, running, write, kGenericProxy);
  }
  for (Access& access : word.accesses) {
    if (access.thread != running || access.write != write) continue;
    access.clock = self.knowledge.clock[running];
    access.scope = std::min(access.scope, scope);
    return;
  }
  word.accesses.push_back({running, self.knowledge.clock[running], write, kGenericProxy, scope});
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
  if (order == kRelease || order == kAcquireRelease) {
    message.released = std::make_shared<Knowledge>(knowledge);
  }
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
  if ((order == kAcquire || order == kAcquireRelease) && message.released != nullptr) {
    self.knowledge.Join(*message.released);
  }
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

uint64_t Execution::Load(const uint64_t* address, Scope scope, Order order) {
  ThreadState& self = threads[running];
  CheckWordRaces(WordAt(address), scope, false);
  self.operation = {Operation::kLoad, address, 0, 0};
  const int outcome = Choose();
  Word& word = WordAt(address);
  const uint64_t value = word.messages[outcome].value;
  Observe(word, outcome, order);
  if (!self.expired) self.polled.emplace_back(&word, word.messages[outcome].key);
  Log("loads", word.address, value);
  return value;
}

void Execution::Store(uint64_t* address, uint64_t value, Scope scope, Order order) {
  ThreadState& self = threads[running];
  CheckWordRaces(WordAt(address), scope, true);
  size_t after = WordAt(address).messages.size() - 1;
  if (HasSeveralWriters(address)) {
    self.operation = {Operation::kStore, address, 0, value};
    Leave(ThreadState::kParked);
    after = static_cast<size_t>(self.outcome);
    self.hash = Mix(self.hash, after);
  }
  HaveEffect();
  CountStore(running, reinterpret_cast<uintptr_t>(address));
  Log("stores", reinterpret_cast<uintptr_t>(address), value);
  Append(WordAt(address), after, value, order, false, running, self.knowledge);
}

// The message that a read-modify-write of the running thread reads.
size_t Execution::ReadToModify(Operation operation, Scope scope) {
  ThreadState& self = threads[running];
  CheckWordRaces(WordAt(operation.word), scope, true);
  self.operation = operation;
  Leave(ThreadState::kParked);
  HaveEffect();
  CountStore(running, reinterpret_cast<uintptr_t>(operation.word));
  Word& word = WordAt(operation.word);
  const auto outcome = static_cast<size_t>(self.outcome);
  Observe(word, outcome, kRelaxed);
  Log("exchanges", word.address, word.messages[outcome].value);
  return outcome;
}

bool Execution::CompareExchange(uint64_t* address, uint64_t* expected, uint64_t desired, Scope scope) {
  const size_t outcome = ReadToModify({Operation::kExchange, address, *expected, desired}, scope);
  Word& word = WordAt(address);
  const uint64_t seen = word.messages[outcome].value;
  if (seen != *expected) {
    *expected = seen;
    return false;
  }
  Append(word, outcome, desired, kRelaxed, true, running, threads[running].knowledge);
  return true;
}

uint64_t Execution::FetchAdd(uint64_t* address, uint64_t add, Scope scope) {
  const size_t outcome = ReadToModify({Operation::kAdd, address}, scope);
  Word& word = WordAt(address);
  const uint64_t seen = word.messages[outcome].value;
  Append(word, outcome, seen + add, kRelaxed, true, running, threads[running].knowledge);
  return seen;
}

// ---- Plain accesses ----

bool Execution::Ordered(const Access& access, size_t thread, Proxy proxy) const {
  const Knowledge& knowledge = KnowledgeOf(thread);
  const bool async = proxy == kAsyncProxy || access.proxy == kAsyncProxy;
  if (access.proxy != proxy || (async && !Includes(kBlock, thread, access.thread))) {
    return access.clock <= (async ? knowledge.async_fenced : knowledge.fenced)[access.thread];
  }
  return access.thread == thread || access.clock <= knowledge.clock[access.thread];
}

void Execution::CheckPlain(uintptr_t byte, size_t thread, bool write, Proxy proxy) {
  const Cell& cell = CellOf(byte);
  if (cell.execution != number) return;
  for (const Access& access : cell.accesses) {
    if ((!write && !access.write) || Ordered(access, thread, proxy)) continue;
    if (access.thread == thread && write && !access.write) continue;  // the stored value depends on the load
    const bool ordered = access.clock <= KnowledgeOf(thread).clock[access.thread];
    const bool async = proxy == kAsyncProxy || access.proxy == kAsyncProxy;
    Fault("race in " + program.NameOf(byte) + " between " + NameOf(thread) +
          (write ? ", which writes, and " : " and ") + NameOf(access.thread) + (access.write ? ", which writes" : "") +
          (!ordered ? ""
           : async  ? ": no async fence between a bulk copy and another access"
                    : ": no alias fence between a multicast and a unicast access"));
  }
}

void Execution::Plain(size_t thread, uintptr_t address, size_t bytes, bool write, bool async) {
  const auto base = reinterpret_cast<uintptr_t>(program.base());
  const auto alias_base = reinterpret_cast<uintptr_t>(program.Alias(program.base()));
  const bool alias = address - alias_base < Program::kBytes;
  const Proxy proxy = async ? kAsyncProxy : alias ? kAliasProxy : kGenericProxy;
  if (alias) address = address - alias_base + base;
  if (address - base >= Program::kBytes) {
    if (write && !OnStack(address)) Fault("a write outside the program's memory");
    return;
  }
  if (thread == running && write) HaveEffect();
  const uint32_t clock = KnowledgeOf(thread).clock[thread];
  for (uintptr_t byte = address; byte < address + bytes; ++byte) {
    CheckPlain(byte, thread, write, proxy);
    Cell& cell = CellOf(byte);
    if (cell.execution != number || write) cell.accesses.clear();
    cell.execution = number;
    const Access access = {thread, clock, write, proxy, kSystem};
    const auto same = std::find_if(cell.accesses.begin(), cell.accesses.end(), [&](const Access& other) {
      return other.thread == thread && other.write == write && other.proxy == proxy;
    });
    if (same != cell.accesses.end()) {
      *same = access;
    } else {
      cell.accesses.push_back(access);
    }
  }
  for (auto word = words.lower_bound(address - 7); word != words.end() && word->first < address + bytes; ++word) {
    for (const Access& access : word->second.accesses) {
      if ((!write && !access.write) || Ordered(access, thread, proxy)) continue;
      Fault("race in " + program.NameOf(word->first) + " between an atomic access of " + NameOf(access.thread) +
            " and a plain one of " + NameOf(thread));
    }
    if (!write || word->second.messages.empty()) continue;
    word->second.next_key = word->second.messages.back().key + kKeyStep;
    word->second.messages.clear();  // the next atomic access finds the value that is about to be written
  }
}

// ---- Barriers and fences ----

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
