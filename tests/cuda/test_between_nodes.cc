// Communicators and calls of ffi/cuda between nodes without GIN: rounds of NCCL messages.
// test_between_nodes_failures.cc has calls that fail.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "../../ffi/plan/algorithms.h"
#include "between_nodes.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

int32_t InputOf(int32_t rank, int64_t element, int round) {
  return static_cast<int32_t>(1000003 * rank + 7 * element + round);
}

// Element i of the result.
int32_t ResultOf(const CallSpec& spec, int32_t rank, int64_t i, int64_t block_count, int round) {
  const auto n = static_cast<int32_t>(spec.group_size);
  const auto sum = [&](int64_t element) {
    uint32_t result = 0;
    for (int32_t r = 0; r < n; ++r) result += static_cast<uint32_t>(InputOf(r, element, round));
    return static_cast<int32_t>(result);
  };
  const int64_t within = i % block_count;
  const auto block = static_cast<int32_t>(i / block_count);
  switch (spec.collective) {
    case Collective::kAllToAll:
      return InputOf(block, rank * block_count + within, round);
    case Collective::kAllGather:
      return InputOf(block, within, round);
    case Collective::kAllReduce:
      return sum(i);
    case Collective::kReduceScatter:
      return sum(rank * block_count + i);
    case Collective::kPermute:
      return InputOf(spec.source_of[rank], i, round);
    default:
      return InputOf(spec.root, i, round);
  }
}

void RunCalls(Communicator& communicator, const CallSpec& spec, int64_t block_count) {
  Request request;
  request.collective = spec.collective;
  request.geometry.ranks_per_node = communicator.size();
  request.block_count = block_count;
  const auto call = Ok(DeviceCall::Make(spec, communicator, DType::kS32, InputCount(request), OutputCount(request)));
  Stream& stream = OwnStream();
  // Consecutive calls without a wait in between: buffers of one call are still in use when the next call is enqueued.
  constexpr int kNumRounds = 2;
  std::vector<std::vector<int32_t>> inputs, outputs;
  for (int round = 0; round < kNumRounds; ++round) {
    inputs.emplace_back(InputCount(request));
    outputs.emplace_back(OutputCount(request), -1);
    for (size_t i = 0; i < inputs.back().size(); ++i) inputs.back()[i] = InputOf(communicator.rank(), i, round);
  }
  for (int round = 0; round < kNumRounds; ++round) {
    CHECK(call->Launch(inputs[round].data(), outputs[round].data(), stream.handle()).ok());
  }
  Until([&] { return stream.num_running == 0; });
  CHECK(communicator.Failure().ok());
  for (int round = 0; round < kNumRounds; ++round) {
    for (size_t i = 0; i < outputs[round].size(); ++i) {
      CHECK(outputs[round][i] == ResultOf(spec, communicator.rank(), i, block_count, round));
    }
  }
}

struct Shape {
  std::vector<int> hosts;
  int32_t ranks_per_node;  // expected
  bool peers_in_host = true;
};

ALONE_TEST_CASE("calls between nodes") {
  std::atomic<int> num_calls{0};
  const std::vector<Shape> shapes = {
      {Hosts(2, 1), 1}, {Hosts(2, 2), 2},  {Hosts(2, 3), 3},  {Hosts(2, 4), 4},        {Hosts(3, 2), 2},
      {Hosts(4, 1), 1}, {{0, 0, 0, 1}, 1}, {{0, 1, 0, 1}, 1}, {{0, 0, 0, 0, 1, 1}, 2}, {Hosts(2, 2), 1, false},
  };
  for (const Shape& shape : shapes) {
    Communicator::Configure(kLong, 3);
    Cluster cluster(shape.hosts);
    cluster.peers_in_host = shape.peers_in_host;
    OnRanks(cluster, [&](ncclComm_t comm, int) {
      Communicator* const communicator = Ok(fake::Get(comm));
      CHECK(communicator->send_recv_proxy() != nullptr);
      CHECK(communicator->placement().ranks_per_node == shape.ranks_per_node);
      Request request;
      request.geometry.ranks_per_node = shape.ranks_per_node;
      request.geometry.num_nodes = communicator->size() / shape.ranks_per_node;
      request.geometry.all_addressable = false;
      for (int c = 0; c <= static_cast<int>(Collective::kBarrier); ++c) {
        request.collective = static_cast<Collective>(c);
        if (OfLists(request.collective)) continue;  // runs on CPUs only
        for (const Algorithm& algorithm : Algorithms(request.collective)) {
          const CallSpec spec = SpecOf(request.collective, communicator->size(), algorithm.name);
          request.source_of = spec.source_of;
          if (!algorithm.supports(request)) continue;
          const bool large = std::string(algorithm.name) == "hierarchical" || c % 2 == 0;
          RunCalls(*communicator, spec, request.collective == Collective::kBarrier ? 0 : large ? 9001 : 5);
          ++num_calls;
        }
      }
    });
    // NCCL does not treat these groups of ranks as nodes.
    CHECK(*cluster.num_aborted == (shape.peers_in_host ? 0 : static_cast<int>(shape.hosts.size())));
  }
  CHECK(num_calls > 300);
}

// XLA's main stream, which has the kernels of the synchronous lane, has priority 0; its stream for collectives, which
// has those of the asynchronous lane, the highest.
ALONE_TEST_CASE("messages of a lane have another priority than its kernels") {
  Communicator::Configure(kLong, 3);
  for (const int highest : {-1, -2, -5}) {
    highest_priority = highest;
    const Cluster cluster(Hosts(2, 1));
    OnRanks(cluster, [&](ncclComm_t comm, int32_t) {
      Communicator& communicator = *Ok(fake::Get(comm));
      CHECK(last_priority == highest);
      CHECK(communicator.AsynchronousLane().ok());
      CHECK(last_priority == (highest == -1 ? -1 : highest + 1));
    });
  }
}

// NCCL would treat them as one node.
ALONE_TEST_CASE("process names determine the nodes") {
  for (const auto& [names, ranks_per_node] :
       {std::pair{"aabb", 2}, {"aaaa", 4}, {"abab", 1}, {"aaab", 1}, {"abcd", 1}}) {
    std::atomic<int> turn{0};
    OnRanks(Hosts(1, 4), [&, names = names, ranks_per_node = ranks_per_node](ncclComm_t comm, int rank) {
      // The name belongs to the process, so each rank sets its own while it reads the name.
      std::thread next;
      after_init = [&] {
        while (turn < rank) std::this_thread::yield();
        Communicator::Configure(kLong, 3, std::string(1, names[rank]));
        next = std::thread([&] {
          while (!Of(comm).made->asked) std::this_thread::yield();
          ++turn;
        });
      };
      Communicator* const communicator = Ok(fake::Get(comm));
      next.join();
      CHECK(communicator != nullptr && communicator->placement().ranks_per_node == ranks_per_node);
      CHECK((communicator->send_recv_proxy() == nullptr) == (ranks_per_node == 4));
    });
  }
}

ALONE_TEST_CASE("a communicator that cannot be created is an error") {
  Communicator::Configure(kLong, 3);
  Cluster cluster(Hosts(2, 2));
  cluster.init_fails = true;
  OnRanks(cluster,
          [&](ncclComm_t comm, int) { CHECK(Has(fake::Get(comm).status(), "ncclCommInitRankConfig: failed")); });
}

ALONE_TEST_CASE("the error names a rank that does not connect") {
  Communicator::Configure(3, 3);
  OnRanks(Hosts(2, 2), [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    device::Window arena;
    int64_t bytes;
    CHECK(communicator.Reserve(1, &arena, &bytes).ok());
    if (rank == 3) {
      CHECK(communicator.CheckSameOnAllRanks("all", 1).ok() && communicator.AllDone("here", OkStatus()).ok());
      return;
    }
    const auto call = Sum(communicator, 100);
    CHECK(!call.ok() == (rank == 1));  // of rank 3's rail
    if (rank != 1) return;
    const std::string late = "rank 3 of other nodes did not come within 3 s (JAXCOMM_TIMEOUT_S)";
    CHECK(Has(call.status(), late));
    // Rank 3 might take for the answer to a later call what this one has sent: there is none.
    CHECK(Has(communicator.Failure(), late));
    CHECK(Has(communicator.send_recv_proxy()->Connect({}, 4, 0), late));
    CHECK(!Of(comm).aborted);  // XLA's
  });
}

// NCCL connects in the thread that ends the group of sends and receives, and returns once it is revoked.
ALONE_TEST_CASE("a connection that NCCL waits for is an error in time") {
  Communicator::Configure(1, 3);
  OnRanks(Hosts(2, 1), [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    device::Window arena;
    int64_t bytes;
    CHECK(communicator.Reserve(1, &arena, &bytes).ok());
    if (rank == 1) {
      CHECK(communicator.CheckSameOnAllRanks("all", 1).ok() && communicator.AllDone("here", OkStatus()).ok());
      return;
    }
    before_group = [] { Until([] { return num_revoked > 0; }); };
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 9, 9);
    CHECK(Has(call.status(), "rank 1 of other nodes did not come within 1 s (JAXCOMM_TIMEOUT_S)"));
    CHECK(Has(communicator.Failure(), "rank 1 of other nodes did not come within 1 s"));
    CHECK(num_revoked == 1);
  });
}

ALONE_TEST_CASE("a communicator for messages that NCCL never completes is an error in time") {
  Communicator::Configure(1, 3);
  static std::atomic<bool> joins{false};
  Cluster cluster(Hosts(2, 1));
  cluster.joins = &joins;
  OnRanks(cluster, [&](ncclComm_t comm, int) {
    CHECK(Has(fake::Get(comm).status(),
              "the other ranks of the group of 2 did not come to make its communicator within 1 s"));
  });
  joins = true;
}

// The errors of two ranks when `of_rank_1` happens. `reached`: it has happened.
std::vector<std::string> MakeWithFault(const Cluster& cluster, double timeout_s, const Fault& of_rank_1,
                                       bool* reached) {
  Communicator::Configure(timeout_s, 3);
  std::vector<std::string> errors(2);
  std::vector<int> ways(2);
  OnRanks(cluster, [&](ncclComm_t comm, int rank) {
    if (rank == 1) fault = of_rank_1;
    const StatusOr<Communicator*> made = fake::Get(comm);
    errors[rank] = made.status().message();
    if (made.ok()) {
      Communicator& communicator = **made;
      const CallSpec spec = SpecOf(Collective::kAllReduce, 2, "ring");
      errors[rank] = DeviceCall::Make(spec, communicator, DType::kS32, 99, 99).status().message();
      ways[rank] = (communicator.gin() ? 1 : 0) + (communicator.send_recv_proxy() ? 2 : 0);
    }
    if (rank == 1) *reached = fault.skipped < 0;
    fault = {};
  });
  CHECK(ways[0] == ways[1]);
  return errors;
}

// Each operation that one rank performs alone fails once. Then either all ranks get an error, or none does.
ALONE_TEST_CASE("a failure on one rank is an error on all, or all take another path") {
  struct Kind {
    std::vector<int> hosts;
    bool gin;
    int num_errors, num_fallbacks;
  };
  for (const Kind& kind : {Kind{Hosts(1, 2), false, 20, 0}, {Hosts(2, 1), false, 27, 0}, {Hosts(2, 1), true, 18, 4}}) {
    int num_errors = 0, num_fallbacks = 0;
    for (const char* call :
         {"kernels", "kernels of GIN", "cudaMalloc", "cudaHostAlloc", "cudaStreamCreate", "cudaMemsetAsync",
          "cudaEventCreate", "ncclMemAlloc", "ncclCommWindowRegister", "ncclGetLsaDevicePointer",
          "ncclCommQueryProperties", "ncclCommInitRankConfig", "ncclDevCommCreate"}) {
      // The first operations precede any exchange between the ranks.
      const bool early = call == std::string("cudaMalloc") || call == std::string("cudaHostAlloc") ||
                         call == std::string("cudaStreamCreate");
      for (int skipped = early ? 1 : 0;; ++skipped) {
        Cluster& cluster = *Keep(std::make_unique<Cluster>(kind.hosts));
        cluster.gin = kind.gin;
        bool reached = false;
        const std::vector<std::string> errors = MakeWithFault(cluster, kLong, {call, skipped}, &reached);
        if (!reached) break;
        CHECK(errors[0].empty() == errors[1].empty());
        CHECK(errors[0].empty() || Has(errors[0], "rank 1 of the group "));
        ++(errors[0].empty() ? num_fallbacks : num_errors);
      }
    }
    CHECK(num_errors == kind.num_errors && num_fallbacks == kind.num_fallbacks);
  }
}

// Each exchange between ranks fails once, on all of them.
ALONE_TEST_CASE("a failed exchange ends the operation that needs it") {
  Communicator::Configure(kLong, 3);
  for (const bool gin : {false, true}) {
    int num_failed = 0;
    for (bool reached = true; reached;) {
      Cluster& cluster = *Keep(std::make_unique<Cluster>(Hosts(2, 2)));
      cluster.gin = gin;
      OnRanks(cluster, [&](ncclComm_t comm, int rank) {
        fault = {"ncclAllGather", num_failed};
        const StatusOr<Communicator*> made = fake::Get(comm);
        Status status = made.status();
        if (made.ok()) {
          const CallSpec spec = SpecOf(Collective::kAllReduce, 4, "hierarchical");
          status = DeviceCall::Make(spec, **made, DType::kS32, 100, 100).status();
        }
        CHECK(status.message() == (fault.skipped < 0 ? "ncclAllGather: failed" : ""));
        if (rank == 0) reached = fault.skipped < 0;
      });
      if (reached) ++num_failed;
    }
    CHECK(num_failed > 12);
  }
}

// One line, of the first rank that has a reason.
void GinIsOff() {
  Communicator::Configure(kLong, 3);
  OnRanks(Hosts(2, 2), [](ncclComm_t comm, int) { CHECK(Ok(fake::Get(comm))->send_recv_proxy() != nullptr); });
}

TEST_CASE("one line says why GIN is off") {
  const std::string said = Alone(GinIsOff);
  CHECK(said ==
        "jaxcomm: no GIN between nodes: rank 0 of 4: NCCL offers no GIN on this network (NCCL_DEBUG=INFO shows "
        "its reason); NCCL sends and receives instead\n");
}

// Simulates a network without strong signals: NCCL detects this when it creates the device communicator.
void GinFails() {
  Communicator::Configure(kLong, 3);
  for (const bool everywhere : {true, false}) {
    Cluster& cluster = *Keep(std::make_unique<Cluster>(Hosts(2, 2)));
    cluster.gin = true;
    OnRanks(cluster, [&](ncclComm_t comm, int rank) {
      if (everywhere || rank == 2) fault = {"ncclDevCommCreate"};
      Communicator* const communicator = Ok(fake::Get(comm));
      CHECK(communicator != nullptr && communicator->gin() == nullptr && communicator->send_recv_proxy() != nullptr);
      CHECK(communicator->placement().ranks_per_node == 2 &&
            communicator->placement().inter_node == InterNode::kSendRecv);
      RunCalls(*communicator, SpecOf(Collective::kAllReduce, 4, "hierarchical"), 1000);
    });
  }
}

TEST_CASE("send and receive replace GIN if it fails") {
  const std::string said = Alone(GinFails);
  CHECK(Count(said, "jaxcomm: no GIN between nodes: rank ") == 1);  // once per process
  CHECK(Count(said, " of 4: ") == 1);
}

// Parallel branches of a graph may run one after the other, and then ranks would wait for each other.
ALONE_TEST_CASE("messages between nodes are not captured") {
  Communicator::Configure(kLong, 3);
  OnRanks(Hosts(2, 1), [](ncclComm_t comm, int) {
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call = Ok(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 9, 9));
    Stream& stream = OwnStream();
    std::vector<int32_t> x(9, 1), y(9, -1);
    stream.captures = true;
    CHECK(Has(call->Launch(x.data(), y.data(), stream.handle()), "can't be part of a CUDA graph"));
    CHECK(stream.num_running == 0);
    stream.captures = false;
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    Until([&] { return stream.num_running == 0; });
    CHECK(y == std::vector<int32_t>(9, 2));
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
