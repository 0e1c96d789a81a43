// Collectives between processes, with several nodes of one test process in the place of processes: every algorithm with
// one and with two copies, many calls at once in different orders, and every way in which a call can end badly.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../ffi/cpu/joint_call.h"
#include "../../ffi/cpu/progress.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/transport/memory_network.h"
#include "check.h"
#include "expected.h"

namespace jaxcomm {
namespace {

using Clock = JointCall::Clock;

// Processes that know each other: through memory those of a node, the others through a network of uneven delays.
class World {
 public:
  explicit World(int num_processes, int num_nodes = 1, uint64_t seed = 0) : num_nodes_(num_nodes) {
    MemoryNetworkOptions options;
    options.jitter_ns = 50'000;
    options.seed = seed;
    fabric_ = std::make_unique<MemoryFabric>(num_processes, options);
    for (int p = 0; p < num_processes && num_nodes > 1; ++p) {
      switchboards_.push_back(std::make_unique<Switchboard>());
      switchboards_[p]->SetNetwork(fabric_->Attach(p, 42, switchboards_[p].get()));
    }
    for (int p = 0; p < num_processes; ++p) {
      nodes_.push_back(std::make_unique<Node>());
      CHECK(nodes_[p]->Open().empty());
    }
    for (int p = 0; p < num_processes; ++p) {
      for (int q = 0; q < num_processes; ++q) {
        std::string error;
        if (NodeOf(p, num_processes) != NodeOf(q, num_processes)) {
          CHECK(switchboards_[p]->network()->Connect(q, switchboards_[q]->network()->address(), &error));
        } else if (p != q) {
          nodes_[p]->ConnectTo(q, *nodes_[q]);
        }
      }
      progress_.push_back(std::make_unique<Progress>(*nodes_[p]));
    }
    fabric_->Start();
  }
  ~World() {
    for (auto& progress : progress_) progress->Stop();  // it may be about to send something
    switchboards_.clear();
  }
  int NodeOf(int process, int num_processes) const { return process * num_nodes_ / num_processes; }
  MemoryFabric& fabric() { return *fabric_; }
  Switchboard* switchboard(int process) { return switchboards_.empty() ? nullptr : switchboards_[process].get(); }
  Node& node(int process) { return *nodes_[process]; }
  Progress& progress(int process) { return *progress_[process]; }

 private:
  const int num_nodes_;
  std::unique_ptr<MemoryFabric> fabric_;
  std::vector<std::unique_ptr<Switchboard>> switchboards_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<Progress>> progress_;
};

// How the parts of a call have ended.
class Results {
 public:
  explicit Results(int num_processes) : errors_(num_processes), ended_(num_processes) {}
  JointCall::Finish For(int process) {
    return [this, process](int64_t, const std::shared_ptr<const Error>& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      CHECK(!ended_[process]);
      ended_[process] = true;
      if (error) errors_[process] = error->message;
      ++num_ended_;
      changed_.notify_all();
    };
  }
  bool WaitFor(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return num_ended_ >= count; });
  }
  std::string error(int process) {
    std::lock_guard<std::mutex> lock(mutex_);
    return errors_[process];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_ended_ = 0;
  std::vector<std::string> errors_;
  std::vector<bool> ended_;
};

// One collective over all processes of a world.
struct Collective1 {
  Request request;
  std::shared_ptr<const JointProgram> program;
  std::vector<int32_t> process_of;
  Values inputs, outputs, expected;

  Collective1(const Algorithm& algorithm, const Request& r, std::vector<int32_t> processes, bool single_copy,
              std::mt19937& random, const World* world = nullptr, int32_t num_processes = 0)
      : request(r), process_of(std::move(processes)) {
    const int32_t n = request.geometry.num_ranks();
    inputs.assign(n, std::vector<int32_t>(InputCount(request)));
    outputs.assign(n, std::vector<int32_t>(OutputCount(request), -1));
    for (auto& input : inputs) {
      for (auto& value : input) value = static_cast<int32_t>(random());
    }
    expected = Expected(request, inputs);
    std::vector<int32_t> node_of;
    for (const int32_t process : process_of) {
      node_of.push_back(world == nullptr ? 0 : world->NodeOf(process, num_processes));
    }
    const int64_t block_count = std::max<int64_t>(request.block_count, 1);
    const auto layout = [&](int64_t count) {
      return Layout{std::max<int64_t>(count / block_count, 1), block_count, block_count};
    };
    program = std::make_shared<const JointProgram>(
        Program::Make(BuildAll(algorithm, request), layout(InputCount(request)), layout(OutputCount(request)),
                      sizeof(int32_t), FindReduce(DType::kS32, ReduceOp::kSum)),
        process_of, node_of, single_copy, InputCount(request), OutputCount(request));
  }

  std::shared_ptr<JointCall> CallOf(World& world, int32_t process, uint64_t key, Results& results,
                                    double timeout_s = 60) {
    JointCall::Spec spec;
    spec.key = key;
    spec.run = static_cast<int64_t>(key / 1000);
    spec.prefix = "psum at test: ";
    spec.what = "call " + std::to_string(key) + " of " + std::to_string(InputCount(request)) + " elements";
    for (size_t r = 0; r < process_of.size(); ++r) spec.ranks.push_back(static_cast<int64_t>(r));
    spec.timeout_s = timeout_s;
    spec.deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    std::vector<RankBuffers> buffers(process_of.size());
    for (size_t r = 0; r < process_of.size(); ++r) {
      if (process_of[r] != process) continue;
      buffers[r].input = reinterpret_cast<const char*>(inputs[r].data());
      buffers[r].output = reinterpret_cast<char*>(outputs[r].data());
    }
    return std::make_shared<JointCall>(world.node(process), world.switchboard(process), process, program,
                                       std::move(spec), std::move(buffers), results.For(process));
  }
};

std::vector<int32_t> Split(int32_t num_ranks, int32_t num_processes, bool interleaved) {
  std::vector<int32_t> process_of;
  for (int32_t r = 0; r < num_ranks; ++r) {
    process_of.push_back(interleaved ? r % num_processes : r * num_processes / num_ranks);
  }
  return process_of;
}

// Within a node with and without pulling plans. Between nodes, those of a plan are nodes or parts of them, and
// processes enter in any order, some of them late.
void EveryAlgorithm(World& world, int32_t num_processes, int32_t num_nodes, std::mt19937& random, uint64_t* key) {
  const std::pair<int, int> shapes[] = {{1, 3}, {1, 8}, {2, 4}, {4, 2}, {1, 5}, {8, 1}, {2, 2}};
#define JAXCOMM_COLLECTIVE(enumerator, name, handler) Collective::enumerator,
  for (const Collective collective : {
#include "../../ffi/collectives.def"
       }) {
#undef JAXCOMM_COLLECTIVE
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const auto& [nodes, ranks_per_node] : shapes) {
        if (nodes % num_nodes != 0) continue;
        for (const int64_t block_count : {0, 7, 9000}) {
          for (const bool pull : {true, false}) {
            Request request;
            request.collective = collective;
            request.geometry = {nodes, ranks_per_node, num_nodes == 1, pull};
            request.block_count = collective == Collective::kBarrier ? 0 : block_count;
            request.chunk_count = block_count / 3;
            const int32_t n = request.geometry.num_ranks();
            request.root = static_cast<int32_t>(random() % n);
            for (int32_t r = 0; r < n && collective == Collective::kPermute; ++r) {
              request.source_of.push_back(static_cast<int32_t>(random() % (n + 1)) - 1);
            }
            if (!algorithm.supports(request)) continue;
            const bool interleaved = num_nodes == 1 && random() % 2;
            Collective1 one(algorithm, request, Split(n, num_processes, interleaved), random() % 2, random, &world,
                            num_processes);
            Results results(num_processes);
            ++*key;
            std::vector<int32_t> order;
            for (int32_t p = 0; p < num_processes; ++p) order.push_back(p);
            std::shuffle(order.begin(), order.end(), random);
            for (const int32_t p : order) {
              auto call = one.CallOf(world, p, *key, results);
              call->Enter();
              world.progress(p).Add(call);
              if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
            }
            CHECK(results.WaitFor(num_processes));
            for (int32_t p = 0; p < num_processes; ++p) CHECK(results.error(p).empty());
            CHECK(one.outputs == one.expected);
          }
        }
      }
    }
  }
}

const Algorithm& Named(Collective collective, const char* name) {
  const Algorithm* algorithm = FindAlgorithm(collective, name);
  CHECK(algorithm != nullptr);
  return *algorithm;
}

Request Sum(int32_t num_ranks, int64_t block_count) {
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry = {1, num_ranks, true, true};
  request.block_count = block_count;
  return request;
}

// Each process enters all calls in an order of its own, from several threads, some of which move the calls themselves.
void ManyAtOnce(World& world, int32_t num_processes, std::mt19937& random, uint64_t* key) {
  constexpr int kCalls = 40;
  std::vector<std::unique_ptr<Collective1>> calls;
  std::vector<std::unique_ptr<Results>> results;
  const char* names[] = {"direct", "ring", "recursive_doubling", "root"};
  for (int c = 0; c < kCalls; ++c) {
    const int32_t n = num_processes * (1 + c % 2);
    calls.push_back(std::make_unique<Collective1>(Named(Collective::kAllReduce, names[c % 4]),
                                                  Sum(n, c % 3 == 0 ? 20000 : 50), Split(n, num_processes, c % 5 == 0),
                                                  c % 2 == 0, random));
    results.push_back(std::make_unique<Results>(num_processes));
  }
  const uint64_t first = *key + 1;
  *key += kCalls;
  std::vector<std::thread> threads;
  for (int32_t p = 0; p < num_processes; ++p) {
    for (int half = 0; half < 2; ++half) {
      std::vector<int> order;
      for (int c = half; c < kCalls; c += 2) order.push_back(c);
      std::shuffle(order.begin(), order.end(), random);
      threads.emplace_back([&, p, order] {
        for (const int c : order) {
          auto call = calls[c]->CallOf(world, p, first + c, *results[c]);
          call->Enter();
          for (int i = 0; i < c && !call->over(); ++i) call->Advance(0);
          world.progress(p).Add(call);
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (int c = 0; c < kCalls; ++c) {
    CHECK(results[c]->WaitFor(num_processes));
    for (int32_t p = 0; p < num_processes; ++p) CHECK(results[c]->error(p).empty());
    CHECK(calls[c]->outputs == calls[c]->expected);
  }
}

// Nobody keeps a call that is over: it holds on to its call site, which may be that of a program that has been dropped.
void CallsAreLetGo(World& world, int32_t num_processes, std::mt19937& random, uint64_t* key) {
  Collective1 one(Named(Collective::kAllReduce, "ring"), Sum(num_processes, 50),
                  Split(num_processes, num_processes, false), false, random);
  Results results(num_processes);
  ++*key;
  std::vector<std::weak_ptr<JointCall>> calls;
  for (int32_t p = 0; p < num_processes; ++p) {
    auto call = one.CallOf(world, p, *key, results);
    calls.push_back(call);
    call->Enter();
    world.progress(p).Add(std::move(call));
  }
  CHECK(results.WaitFor(num_processes));
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(60);
  for (const auto& call : calls) {
    while (!call.expired() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(call.expired());
  }
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A process that comes late, or never, or gives up, or brings something else: everybody gets an error that says so.
void Failures(World& world, std::mt19937& random, uint64_t* key) {
  const Algorithm& ring = Named(Collective::kAllReduce, "ring");
  const auto next_run = [key] { return *key = (*key / 1000 + 1) * 1000; };
  {  // process 2 never comes
    Collective1 one(ring, Sum(3, 100), {0, 1, 2}, true, random);
    Results results(3);
    const uint64_t now = next_run();
    std::vector<std::shared_ptr<JointCall>> calls;
    for (int32_t p = 0; p < 2; ++p) {
      calls.push_back(one.CallOf(world, p, now, results, 0.2));
      calls[p]->Enter();
      world.progress(p).Add(calls[p]);
    }
    CHECK(results.WaitFor(2));
    int named = 0;
    for (int32_t p = 0; p < 2; ++p) {
      CHECK(Has(results.error(p), "psum at test: "));
      named += Has(results.error(p), "by ranks [2] (process 2) in no collective");
    }
    CHECK(named >= 1);
    // Then it comes, and is told at once; its part lets go of the others' memory.
    auto late = one.CallOf(world, 2, now, results, 60);
    late->Enter();
    world.progress(2).Add(late);
    CHECK(results.WaitFor(3));
    CHECK(Has(results.error(2), "gave up"));
    // The call is over for all: what it used is free again.
    CHECK(calls[0]->Reclaim() || world.node(0).board().Find(now) < 0);
  }
  {  // one gives up while all run
    Collective1 one(ring, Sum(3, 100), {0, 1, 2}, false, random);
    Results results(3);
    const uint64_t now = next_run();
    std::vector<std::shared_ptr<JointCall>> calls;
    for (int32_t p = 0; p < 3; ++p) calls.push_back(one.CallOf(world, p, now, results));
    for (auto& call : calls) call->Enter();
    calls[0]->Advance();  // one of three: nobody can be done
    calls[1]->Fail({Error::Kind::kInvalid, "had enough"});
    for (int32_t p = 0; p < 3; ++p) world.progress(p).Add(calls[p]);
    CHECK(results.WaitFor(3));
    CHECK(results.error(1) == "had enough");
    for (const int32_t p : {0, 2}) CHECK(Has(results.error(p), "gave up: had enough"));
  }
  {  // two disagree about the size
    Collective1 one(ring, Sum(2, 100), {0, 1}, true, random), other(ring, Sum(2, 101), {0, 1}, true, random);
    Results results(2);
    const uint64_t now = next_run();
    auto a = one.CallOf(world, 0, now, results), b = other.CallOf(world, 1, now, results);
    a->Enter();
    b->Enter();
    world.progress(0).Add(a);
    world.progress(1).Add(b);
    CHECK(results.WaitFor(2));
    for (int32_t p = 0; p < 2; ++p) CHECK(Has(results.error(p), "bring") || Has(results.error(p), "gave up"));
  }
  {  // the same key twice
    Collective1 one(ring, Sum(2, 100), {0, 1}, true, random);
    Results results(2), more(2);
    const uint64_t now = next_run();
    auto a = one.CallOf(world, 0, now, results), again = one.CallOf(world, 0, now, more);
    a->Enter();
    again->Enter();
    CHECK(more.WaitFor(1));
    CHECK(Has(more.error(0), "can't tell apart"));
    auto b = one.CallOf(world, 1, now, results);
    b->Enter();
    world.progress(0).Add(a);
    world.progress(1).Add(b);
    CHECK(results.WaitFor(2));
    CHECK(Has(results.error(0), "gave up") || results.error(0).empty() || Has(results.error(1), "gave up"));
  }
  {  // an error of the whole run reaches its calls
    Collective1 one(ring, Sum(2, 100), {0, 1}, true, random);
    Results results(2);
    const uint64_t now = next_run();
    auto a = one.CallOf(world, 0, now, results);
    a->Enter();
    world.progress(0).Add(a);
    world.progress(0).FailRun(static_cast<int64_t>(now / 1000), {Error::Kind::kInvalid, "elsewhere"});
    CHECK(results.WaitFor(1));
    CHECK(results.error(0) == "elsewhere");
  }
}

// A process of another node is lost, or gives up, or brings something else.
void FailuresBetweenNodes(std::mt19937& random, uint64_t* key) {
  const Algorithm& ring = Named(Collective::kAllReduce, "ring");
  const auto has_all = [](Results& results, const std::string& part) {
    for (const int32_t p : {0, 1}) CHECK(Has(results.error(p), part));
  };
  const auto request = [](int64_t block_count) {
    Request flat = Sum(3, block_count);
    flat.geometry = {3, 1, false, true};
    return flat;
  };
  for (const char* kind : {"lost", "gives up", "never comes", "disagrees"}) {
    World world(3, 3, *key);
    const bool disagrees = kind == std::string("disagrees");
    // Nobody waits in a direct all_gather, so all get as far as telling what they have done. In a ring all wait.
    const bool direct = disagrees && random() % 2;
    const Algorithm& algorithm = direct ? Named(Collective::kAllGather, "direct") : ring;
    Request here = request(100), there = request(101);
    here.collective = there.collective = direct ? Collective::kAllGather : Collective::kAllReduce;
    Collective1 one(algorithm, here, {0, 1, 2}, false, random, &world, 3);
    Collective1 other(algorithm, there, {0, 1, 2}, false, random, &world, 3);
    Results results(3);
    const uint64_t now = *key = (*key / 1000 + 1) * 1000;
    std::vector<std::shared_ptr<JointCall>> calls;
    for (int32_t p = 0; p < 3; ++p) {
      calls.push_back((disagrees && p == 2 ? other : one).CallOf(world, p, now, results, disagrees ? 60 : 1));
      if (p == 2 && kind != std::string("gives up") && !disagrees) break;
      calls[p]->Enter();
      if (p == 2 && !disagrees) calls[p]->Fail({Error::Kind::kInvalid, "had enough"});
      world.progress(p).Add(calls[p]);
    }
    if (kind == std::string("lost")) world.fabric().Lose(2);
    CHECK(results.WaitFor(kind == std::string("gives up") || disagrees ? 3 : 2));
    if (kind == std::string("lost")) has_all(results, "[2] (process 2)");
    if (kind == std::string("gives up")) has_all(results, "had enough");
    if (disagrees) {
      for (int32_t p = 0; p < 3; ++p) {
        CHECK(Has(results.error(p), " of 100 elements") && Has(results.error(p), " of 101 elements"));
      }
    }
    for (const int32_t p : {0, 1}) CHECK(!results.error(p).empty());
  }
}

bool BoardIsFree(const Board& board) {
  return std::all_of(std::begin(board.keys), std::end(board.keys), [](const auto& key) { return key.load() == 0; });
}

// Calls that fail leave nothing behind, whether the others take part, come late, or never come.
void FailuresAreReclaimed(int num_processes, int num_nodes, std::mt19937& random, uint64_t* key) {
  constexpr int kRounds = 20, kCallsPerRound = 50;
  World world(num_processes, num_nodes, 17);
  Request request = Sum(num_processes, 20000);
  if (num_nodes > 1) request.geometry = {num_nodes, num_processes / num_nodes, false, true};
  uint32_t memories = 0;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t run = *key = (*key / 1000 + 1) * 1000;
    Collective1 one(Named(Collective::kAllReduce, num_nodes > 1 ? "hierarchical" : "ring"), request,
                    Split(num_processes, num_processes, false), false, random, &world, num_processes);
    std::vector<std::unique_ptr<Results>> results;
    std::vector<std::shared_ptr<JointCall>> calls;
    std::vector<int> num_entered(kCallsPerRound);
    for (int c = 0; c < kCallsPerRound; ++c) {
      results.push_back(std::make_unique<Results>(num_processes));
      for (int32_t p = 0; p < num_processes; ++p) {
        if (p > 0 && random() % 3 == 0) continue;
        auto call = one.CallOf(world, p, run + c, *results[c], 0.01);
        ++num_entered[c];
        call->Enter();
        if (random() % 2) call->Advance();
        if (random() % 4 == 0) call->Fail({Error::Kind::kInvalid, "had enough"});
        world.progress(p).Add(call);
        if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
      }
    }
    for (int c = 0; c < kCallsPerRound; ++c) CHECK(results[c]->WaitFor(num_entered[c]));
    for (int32_t p = 0; p < num_processes; ++p) {
      const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
      while (!BoardIsFree(world.node(p).board())) {
        CHECK(Clock::now() < limit);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    if (round == kRounds / 2) memories = world.node(0).board().num_memories.load();
  }
  CHECK(world.node(0).board().num_memories.load() <= memories + 1);
}

// A process of the node that is killed in a call: the error names it, and what it could have touched is used again.
void KilledProcess(std::mt19937& random, uint64_t* key) {
  const Algorithm& ring = Named(Collective::kAllReduce, "ring");
  Collective1 one(ring, Sum(2, 100), {0, 1}, false, random);
  const uint64_t call_key = *key = (*key / 1000 + 1) * 1000;
  int to_parent[2];
  CHECK(pipe(to_parent) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {  // enters the call and does nothing more
    Node node;
    std::string error;
    Block block;
    bool ok = node.Open().empty() && node.Take(one.program->block_bytes(1), &block, &error);
    const int number = node.board().Reserve(call_key);
    Slot& slot = node.board().slots[number];
    slot.memory = block.memory;
    slot.offset = block.offset;
    slot.fingerprint = one.program->fingerprint();
    node.board().Publish(number, call_key);
    const NodeAddress address = node.address();
    ok = ok && write(to_parent[1], &address, sizeof(address)) == sizeof(address);
    for (;;) pause();
  }
  NodeAddress address;
  CHECK(read(to_parent[0], &address, sizeof(address)) == sizeof(address));
  World world(1);
  CHECK(world.node(0).Connect(1, address).empty());
  Results results(1);
  const auto call = one.CallOf(world, 0, call_key, results);
  call->Enter();
  world.progress(0).Add(call);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(kill(child, SIGKILL) == 0);
  CHECK(results.WaitFor(1));
  CHECK(Has(results.error(0), "while running, the process of ranks [1] (process 1) has ended"));
  const Clock::time_point limit = Clock::now() + std::chrono::seconds(30);
  while (!BoardIsFree(world.node(0).board())) {
    CHECK(Clock::now() < limit);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(waitpid(child, nullptr, 0) == child);
  close(to_parent[0]);
  close(to_parent[1]);
}

void Boards() {
  Node node;
  CHECK(node.Open().empty());
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
  CHECK(board.Find(12345) < 0);
  std::string why;
  CHECK(!board.FindFailure(7, &why));
  board.AddFailure(7, "seven");
  board.AddFailure(8, std::string(5000, 'x'));
  CHECK(board.FindFailure(7, &why) && why == "seven");
  CHECK(board.FindFailure(8, &why) && why == std::string(Board::kFailureWords * 8, 'x'));
  for (int64_t run = 100; run < 100 + Board::kNumFailures; ++run) board.AddFailure(run, "later");
  CHECK(!board.FindFailure(7, &why));
}

void Memory() {
  Node node;
  CHECK(node.Open().empty());
  std::string error;
  std::vector<Block> blocks;
  for (const uint64_t bytes : {1, 4096, 4097, 100000, 5 << 20, 9 << 20, 20 << 20}) {
    for (int i = 0; i < 3; ++i) {
      Block block;
      CHECK(node.Take(bytes, &block, &error));
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
    Block block;
    CHECK(node.Take(1 + i * 1000, &block, &error));
    node.Give(block);
  }
  CHECK(node.board().num_memories.load() <= memories + 2);
  // Strangers.
  Node other;
  CHECK(other.Open().empty());
  NodeAddress address = node.address();
  address.token[1] ^= 1;
  CHECK(Has(other.Connect(1, address), "not the one that was announced"));
  address = node.address();
  address.board_fd = 0;
  CHECK(!other.Connect(1, address).empty());
  address.pid = 1 << 30;
  CHECK(Has(other.Connect(1, address), "can't be found"));
  CHECK(other.Connect(1, node.address()).empty());
}

}  // namespace
}  // namespace jaxcomm

int main() {
  using namespace jaxcomm;
  Boards();
  Memory();
  std::mt19937 random(11);
  uint64_t key = 1000;
  KilledProcess(random, &key);  // first: it forks, which threads don't mix with
  std::printf("ok killed process\n");
  for (const int32_t num_processes : {2, 3}) {
    World world(num_processes);
    EveryAlgorithm(world, num_processes, 1, random, &key);
    std::printf("ok every algorithm, %d processes\n", num_processes);
    for (int round = 0; round < 10; ++round) ManyAtOnce(world, num_processes, random, &key);
    std::printf("ok many at once, %d processes\n", num_processes);
    CallsAreLetGo(world, num_processes, random, &key);
  }
  {
    World world(4, 2, 5);
    EveryAlgorithm(world, 4, 2, random, &key);
    std::printf("ok every algorithm, 2 nodes of 2 processes\n");
  }
  for (int round = 0; round < 5; ++round) FailuresBetweenNodes(random, &key);
  std::printf("ok failures between nodes\n");
  FailuresAreReclaimed(3, 1, random, &key);
  FailuresAreReclaimed(4, 2, random, &key);
  std::printf("ok failures leave nothing behind\n");
  for (int round = 0; round < 20; ++round) {
    World world(3);
    Failures(world, random, &key);
  }
  std::printf("ok failures\n");
  return 0;
}
