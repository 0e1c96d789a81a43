// Fakes several processes in one test program: each has its own Node. Runs collectives between them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/cpu/inter_process_call.h"
#include "../../ffi/cpu/progress_thread.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "../plan/expected.h"
#include "../transport/memory_network.h"
#include "participants.h"

namespace jaxcomm {

using Clock = InterProcessCall::Clock;

// Connected processes: those of one node share memory, the others use a fake network.
class World {
 public:
  // With random delays on the network.
  explicit World(int num_processes, int num_nodes = 1, uint64_t seed = 0)
      : World(num_processes, num_nodes, Uneven(seed)) {
    fabric_->Start();
  }
  // The test steps the network.
  World(int num_processes, int num_nodes, const MemoryNetworkOptions& options)
      : num_nodes_(num_nodes), fabric_(std::make_unique<MemoryFabric>(num_processes, options)) {
    for (int p = 0; p < num_processes && num_nodes > 1; ++p) {
      endpoints_.push_back(std::make_unique<ActiveMessages>());
      endpoints_[p]->SetNetwork(fabric_->Attach(p, 42, endpoints_[p].get()));
    }
    for (int p = 0; p < num_processes; ++p) {
      nodes_.push_back(std::make_unique<Node>());
      CHECK(nodes_[p]->Open().ok());
    }
    for (int p = 0; p < num_processes; ++p) {
      for (int q = 0; q < num_processes; ++q) {
        if (NodeOf(p, num_processes) != NodeOf(q, num_processes)) {
          CHECK(endpoints_[p]->network()->Connect(q, endpoints_[q]->network()->address()).ok());
        } else if (p != q) {
          nodes_[p]->ConnectTo(q, *nodes_[q]);
        }
      }
      progress_threads_.push_back(std::make_unique<ProgressThread>(*nodes_[p]));
    }
  }
  ~World() {
    for (auto& progress_thread : progress_threads_) progress_thread->Stop();  // it may be about to send
    endpoints_.clear();
  }
  int NodeOf(int process, int num_processes) const { return process * num_nodes_ / num_processes; }
  MemoryFabric& fabric() { return *fabric_; }
  ActiveMessages* active_messages(int process) { return endpoints_.empty() ? nullptr : endpoints_[process].get(); }
  Node& node(int process) { return *nodes_[process]; }
  ProgressThread& progress_thread(int process) { return *progress_threads_[process]; }

 private:
  static MemoryNetworkOptions Uneven(uint64_t seed) {
    MemoryNetworkOptions options;
    options.jitter_ns = 50'000;
    options.seed = seed;
    return options;
  }

  const int num_nodes_;
  std::unique_ptr<MemoryFabric> fabric_;
  std::vector<std::unique_ptr<ActiveMessages>> endpoints_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<ProgressThread>> progress_threads_;
};

// The result of a call in each process.
class Results {
 public:
  explicit Results(int num_processes) : errors_(num_processes), ended_(num_processes) {}
  InterProcessCall::Finish For(int process) {
    return [this, process](int64_t, const Status& status) {
      CHECK(!ended_[process].exchange(true));
      errors_[process] = status.message();
      ended_count_.Add(status);
    };
  }
  bool WaitFor(int count) { return ended_count_.WaitFor(count); }
  int num_ended() { return ended_count_.count(); }
  std::string error(int process) { return errors_[process]; }
  void ExpectSuccess() {
    CHECK(WaitFor(static_cast<int>(errors_.size())));
    for (const std::string& error : errors_) CHECK(error.empty());
  }

 private:
  Counter ended_count_;
  std::vector<std::string> errors_;
  std::vector<std::atomic<bool>> ended_;
};

// One collective over all processes of a world.
struct Collective1 {
  Request request;
  std::shared_ptr<const InterProcessProgram> program;
  std::vector<int32_t> process_of;
  uint64_t group = 0;  // as in RunAndGroup
  int64_t first_rank = 0;
  bool numbered = false;
  CallRecord record;
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
      return BlockLayout{std::max<int64_t>(count / block_count, 1), block_count, block_count};
    };
    program = std::make_shared<const InterProcessProgram>(
        Program::Make(BuildAll(algorithm, request), layout(InputCount(request)), layout(OutputCount(request)),
                      sizeof(int32_t), FindReduce(DType::kS32, ReduceOp::kSum)),
        process_of, node_of, single_copy, InputCount(request), OutputCount(request));
  }

  std::shared_ptr<InterProcessCall> CallOf(World& world, int32_t process, uint64_t key, Results& results,
                                           double timeout_s = 60, int64_t run_id = -1, double warn_s = 1e6,
                                           bool asynchronous = false) {
    InterProcessCall::Spec spec;
    spec.key = key;
    spec.run = {run_id >= 0 ? run_id : static_cast<int64_t>(key / 1000), group};
    auto names = std::make_shared<CallNames>();
    names->prefix = "psum at test: ";
    spec.what = "call " + std::to_string(key) + " of " + std::to_string(InputCount(request)) + " elements";
    for (size_t r = 0; r < process_of.size(); ++r) names->ranks.push_back(first_rank + static_cast<int64_t>(r));
    spec.names = std::move(names);
    spec.asynchronous = asynchronous;
    spec.numbered = numbered;
    spec.record = record;
    spec.wait = BoundedWait(Clock::now(), {timeout_s, warn_s});
    std::vector<RankBuffers> buffers(process_of.size());
    for (size_t r = 0; r < process_of.size(); ++r) {
      if (process_of[r] != process) continue;
      buffers[r].input = reinterpret_cast<const char*>(inputs[r].data());
      buffers[r].output = reinterpret_cast<char*>(outputs[r].data());
    }
    return std::make_shared<InterProcessCall>(world.node(process), world.active_messages(process), process, program,
                                              std::move(spec), std::move(buffers), results.For(process));
  }
};

// Advances the call until it waits. Returns whether the call is over.
inline bool Move(InterProcessCall& call) {
  InterProcessCall::AdvanceResult status;
  while ((status = call.Advance()) == InterProcessCall::AdvanceResult::kMoved) {
  }
  return status == InterProcessCall::AdvanceResult::kOver;
}

template <typename Condition>
void WaitUntil(Condition condition) {
  const Clock::time_point limit = Clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    CHECK(Clock::now() < limit);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

inline std::vector<int32_t> Split(int32_t num_ranks, int32_t num_processes, bool interleaved) {
  std::vector<int32_t> process_of;
  for (int32_t r = 0; r < num_ranks; ++r) {
    process_of.push_back(interleaved ? r % num_processes : r * num_processes / num_ranks);
  }
  return process_of;
}

inline const Algorithm& Named(Collective collective, const char* name) {
  const Algorithm* algorithm = FindAlgorithm(collective, name);
  CHECK(algorithm != nullptr);
  return *algorithm;
}

inline Request Sum(int32_t num_ranks, int64_t block_count) {
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry = {1, num_ranks, true, true};
  request.block_count = block_count;
  return request;
}

// The ranks of a node write to each other without waits. The call ends when all have left.
inline Request Exchange(int32_t num_ranks, int64_t block_count) {
  Request request = Sum(num_ranks, block_count);
  request.collective = Collective::kAllGather;
  request.geometry.pull = false;
  return request;
}

// The same between nodes.
inline Request Gather(int32_t num_nodes, int32_t ranks_per_node, int64_t block_count) {
  Request request = Exchange(num_nodes * ranks_per_node, block_count);
  request.geometry = {num_nodes, ranks_per_node, false, true};
  return request;
}

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace jaxcomm
