// Errors of communicators, equal on all ranks: impossible requests, ranks that differ, ranks that do not arrive.
#include <atomic>
#include <string>

#include "fakes/machine.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// All ranks get the error, at the first use and at every later one.
void Refused(World* world, const std::string& expected, const Fault& of_rank_2 = {}) {
  OnRanks(*world, [&](Rank& rank) {
    if (rank.rank == 2) fault = of_rank_2;
    for (int i = 0; i < 2; ++i) {
      const Status refused = Get(rank).status();
      if (!Has(refused, expected)) std::fprintf(stderr, "rank %d: %s\n", rank.rank, refused.message().c_str());
      CHECK(Has(refused, expected));
    }
  });
}

ALONE_TEST_CASE("impossible requests are refused") {
  Communicator::Configure(20, 4);
  Refused(&NodesOf(2, 1, NCCL_GIN_TYPE_NONE), "NCCL offers no GIN on this network");
  auto* plain = new World(2);
  plain->device_api = false;
  Refused(plain, "NCCL makes no windows on the memory of the group's GPUs");
  auto* null = new World(2);
  null->windows = false;
  Refused(null, "NCCL gave no window");
  Refused(new World(3), "rank 2 of the group has no 2097152 bytes of GPU memory left for the signals",
          {"ncclMemAlloc"});
  // The rank without one adds NCCL's reason.
  OnRanks(*new World(3), [](Rank& rank) {
    if (rank.rank == 2) fault = {"ncclMemAlloc"};
    const std::string error = Get(rank).status().message();
    const std::string end = rank.rank == 2 ? "MEM_FRACTION (ncclMemAlloc: failed)" : "XLA_PYTHON_CLIENT_MEM_FRACTION";
    CHECK(error.size() > end.size() && error.substr(error.size() - end.size()) == end);
  });
  OnRanks(*new World(2), [](Rank& rank) {
    if (rank.rank == 0) fault = {"ncclGetUniqueId"};
    CHECK(Get(rank).status().message() == "ncclGetUniqueId failed on rank 0 of the group");
  });
  CHECK(num_symmetric == 0);  // the other ranks have freed theirs
  auto* uneven = new World(3);
  uneven->spacing_error = 64;
  Refused(uneven, "not equally spaced");
}

// Each exchange between ranks fails once, on all of them.
ALONE_TEST_CASE("a failed exchange ends the operation that needs it") {
  Communicator::Configure(20, 4);
  for (const bool gin : {false, true}) {
    int num_failed = gin ? 1 : 0;  // the failure of the first one, between ranks that do not know each other, lasts
    for (bool reached = true; reached;) {
      auto* world = gin ? &NodesOf(2, 2) : new World(1);
      world->multimem = true;
      OnRanks(*world, [&](Rank& rank) {
        fault = {"ncclAllGather", num_failed};
        const StatusOr<Communicator*> communicator = Get(rank);
        Status status = communicator.status();
        CallSpec spec = SpecOf(Collective::kAllReduce, world->n);
        for (const char* algorithm : {gin ? "ring" : "direct", gin ? "hierarchical" : "multimem"}) {
          if (!status.ok()) break;
          spec.algorithm = algorithm;
          status = DeviceCall::Make(spec, **communicator, DType::kF32, 1000, 1000).status();
        }
        CHECK(status.message() == (fault.skipped < 0 ? "ncclAllGather: failed" : ""));
        if (rank.rank == 0) reached = fault.skipped < 0;
      });
      if (reached) ++num_failed;
    }
    CHECK(num_failed > 12);
  }
}

// The errors of two ranks when `of_rank_1` happens. `reached`: it has happened.
std::vector<std::string> MakeWithFault(World* world, const Fault& of_rank_1, bool* reached) {
  std::vector<std::string> errors(2);
  OnRanks(*world, [&](Rank& rank) {
    if (rank.rank == 1) fault = of_rank_1;
    const StatusOr<Communicator*> made = Get(rank);
    Status status = made.status();
    CallSpec spec = SpecOf(Collective::kAllReduce, 2, "ring");
    if (status.ok()) status = DeviceCall::Make(spec, **made, DType::kS32, 99, 99).status();
    spec = SpecOf(Collective::kDispatch, 2, "hierarchical");
    spec.row_count = spec.choices = 1, spec.num_experts = 2;
    if (status.ok()) status = DeviceCall::Make(spec, **made, DType::kS32, 9, 9).status();
    errors[rank.rank] = status.message();
    if (rank.rank == 1) *reached = fault.skipped < 0;
    fault = {};
  });
  return errors;
}

// Each operation that one rank performs alone fails once. Then all ranks get an error.
ALONE_TEST_CASE("a failure on one rank is an error on all") {
  Communicator::Configure(100, 4);
  for (const auto& [num_nodes, num_expected] : {std::pair{1, 21}, {2, 23}}) {
    int num_errors = 0;
    for (const char* call : {"kernels", "kernels of GIN", "cudaMalloc", "cudaHostAlloc", "cudaStreamCreate",
                             "cudaMemsetAsync", "ncclMemAlloc", "ncclCommWindowRegister", "ncclGetLsaDevicePointer",
                             "ncclCommQueryProperties", "ncclCommInitRankConfig", "ncclDevCommCreate"}) {
      // The first operations precede any exchange between the ranks.
      const bool early = call == std::string("cudaMalloc") || call == std::string("cudaHostAlloc") ||
                         call == std::string("cudaStreamCreate");
      for (int skipped = early ? 1 : 0;; ++skipped) {
        bool reached = false;
        const std::vector<std::string> errors =
            MakeWithFault(&NodesOf(num_nodes, 2 / num_nodes), {call, skipped}, &reached);
        if (!reached) break;
        CHECK(!errors[1].empty() && Has(errors[0], "rank 1 of the group "));
        ++num_errors;
      }
    }
    CHECK(num_errors == num_expected);
  }
}

// The peers do not know yet which process they wait for.
TEST_CASE("a rank without memory for first contact ends the waits of its peers") {
  for (const std::string call : {"cudaHostAlloc", "cudaMalloc", "cudaStreamCreate"}) {
    Alone([&] {
      Communicator::Configure(20, 4);
      bool reached = false;
      const std::vector<std::string> errors = MakeWithFault(new World(2), {call, 0}, &reached);
      CHECK(errors[1] == call + ": failed");
      CHECK(errors[0] == "process 0 failed: first contact of a group: " + errors[1]);
    });
  }
}

// The shapes of a dispatch may differ between ranks.
ALONE_TEST_CASE("operands that do not fit on one rank are an error on all") {
  Communicator::Configure(20, 4);
  for (World* const world : {new World(2), &NodesOf(2, 1)}) {
    OnRanks(*world, [&](Rank& rank) {
      CallSpec spec = SpecOf(Collective::kDispatch, 2, world->num_lsa_teams == 1 ? "" : "hierarchical");
      spec.row_count = 4;
      spec.choices = 1;
      spec.num_experts = 2;
      const auto refused = [&](int64_t count) {
        return DeviceCall::Make(spec, *ValueOf(Get(rank)), DType::kF32, count, 8).status();
      };
      const char* const other = "rank 1 of the group failed when it compared its shapes";
      CHECK(Has(refused(rank.rank == 1 ? 6 : 8), rank.rank == 1 ? "rows of 4 elements" : other));
      CHECK(Has(refused(rank.rank == 1 ? 4 : 8), "the hash of the shapes of the rows must be the same on all ranks"));
    });
  }
}

ALONE_TEST_CASE("a GPU that cannot be selected is an error") {
  Communicator::Configure(20, 4);
  OnRanks(*new World(1), [](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    device::Window arena;
    device::Comm comm;
    int64_t bytes = 0;
    const auto refused = [&](auto call) {
      fault = {"cudaSetDevice"};
      return call().message() == "cudaSetDevice: failed";
    };
    CHECK(refused([&] { return communicator.Reserve(1, &arena, &bytes); }));
    CHECK(refused([&] { return communicator.ReserveFor("mine", 1, &comm); }));
    CHECK(refused([&] { return communicator.CheckSameOnAllRanks("a", 1); }));
    CHECK(refused([&] { return communicator.AllDone("here", OkStatus()); }));
    CHECK(communicator.Reserve(1, &arena, &bytes).ok());
    fault = {"cudaMemsetAsync"};  // an arena of one owner is zero at first
    CHECK(communicator.ReserveFor("mine", 1, &comm).message() == "cudaMemsetAsync: failed");
    // Peers would wait for the kernel of a call.
    FakeXla xla(*StateOf(SpecOf(Collective::kAllReduce, 1)), NewStream(), rank.device(), &rank);
    int32_t x[4] = {}, y[4];
    xla.Use(x, 4, y, 4);
    CHECK(xla.Initialize().empty() && Communicator::OwnFailure().ok());
    fault = {"cudaSetDevice"};
    CHECK(Has(xla.Execute(), "cudaSetDevice: failed"));
    CHECK(Has(Communicator::OwnFailure(), "here.py:1: cudaSetDevice: failed"));
  });
}

ALONE_TEST_CASE("ranks with different programs get an error") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    device::Window arena;
    int64_t bytes = 0;
    const int64_t own = int64_t{40 + 8 * rank.rank} << 20, other = (int64_t{88} << 20) - own;
    const Status refused = communicator.Reserve(own, &arena, &bytes);
    CHECK(refused.code() == StatusCode::kInvalidArgument);  // no failure of the process
    CHECK(refused.message() == "rank " + std::to_string(1 - rank.rank) + " of the group wants " +
                                   std::to_string(other) + " bytes for the arena, this one " + std::to_string(own) +
                                   ": their programs differ");
    CallSpec spec = SpecOf(Collective::kAllReduce, 2);
    spec.max_sms = 2 + rank.rank;
    for (const int64_t count : {1 << 22, 3000}) {  // a plan, LL messages
      CHECK(Has(DeviceCall::Make(spec, communicator, DType::kF32, count, count).status(),
                "(max_sms) must be the same on all ranks, but is " + std::to_string(3 - rank.rank) + " on rank " +
                    std::to_string(1 - rank.rank)));
    }
  });
}

// Settings from the environment. Rank 1 gets other settings after rank 0 has read its own.
ALONE_TEST_CASE("ranks with different settings get an error") {
  struct Settings {
    int32_t channels;
    bool symmetric_buffers;
  };
  const auto differ = [](Settings of_0, Settings of_1, const std::string& on_0, const std::string& on_1) {
    Communicator::Configure(20, of_0.channels, "", of_0.symmetric_buffers);
    auto* world = new World(2);
    std::atomic<std::atomic<bool>*> asked{nullptr};
    OnRanks(*world, [&](Rank& rank) {
      if (rank.rank == 0) after_init = [&] { asked = rank.made->asked.get(); };
      if (rank.rank == 1) {
        after_init = [&] {
          while (asked == nullptr || !*asked.load()) std::this_thread::yield();
          Communicator::Configure(20, of_1.channels, "", of_1.symmetric_buffers);
        };
      }
      for (int i = 0; i < 2; ++i) {
        CHECK(Has(Get(rank).status(), rank.rank == 0 ? on_0 : on_1));
      }
    });
  };
  differ({4, true}, {5, true}, "JAXCOMM_MAX_SMS must be the same on all ranks, but is 5 on rank 1 and 4 on rank 0",
         "JAXCOMM_MAX_SMS must be the same on all ranks, but is 4 on rank 0 and 5 on rank 1");
  differ({4, true}, {4, false},
         "JAXCOMM_SYMMETRIC_BUFFERS must be the same on all ranks, but is 0 on rank 1 and 1 on rank 0",
         "JAXCOMM_SYMMETRIC_BUFFERS must be the same on all ranks, but is 1 on rank 0 and 0 on rank 1");
}

// The messages of the first rank may still be there when the other one arrives, which then continues.
ALONE_TEST_CASE("ranks that did not meet do not continue") {
  Communicator::Configure(0.2, 4);
  auto* world = new World(2);
  std::atomic<int> turn{0};
  OnRanks(*world, [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    Rank& made = *rank.made;
    Communicator& other = *ValueOf(Get(*new Rank{new World(1), 0}));
    if (rank.rank == 1) {
      while (turn < 1) std::this_thread::yield();
      CHECK(communicator.CheckSameOnAllRanks("a", 1).ok());
      return;
    }
    const std::string late = "the other ranks of the group of 2 did not come within 0.2 s";
    CHECK(Has(communicator.CheckSameOnAllRanks("a", 1), late));
    turn = 1;
    const int before = made.num_gathers;
    device::Window arena;
    int64_t bytes = 0;
    for (int i = 0; i < 2; ++i) {
      CHECK(Has(communicator.CheckSameOnAllRanks("b", 1), "ranks did not meet before: " + late));
      CHECK(Has(communicator.Reserve(1, &arena, &bytes), "ranks did not meet before: " + late));
      CHECK(Has(communicator.AllDone("here", OkStatus()), "ranks did not meet before: " + late));
      CHECK(Has(communicator.Failure(), late));
    }
    CHECK(made.num_gathers == before);
    CHECK(other.Failure().ok());
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
