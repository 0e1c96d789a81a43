// What communicators refuse, on all ranks alike: what can't work, ranks that differ, ranks that don't come.
#include <atomic>
#include <string>

#include "fakes/machine.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// All ranks are told what is wrong, at the first use and ever after.
void Refused(World* world, const std::string& expected, const Fault& of_rank_2 = {}) {
  OnRanks(*world, [&](Rank& rank) {
    if (rank.rank == 2) fault = of_rank_2;
    for (int i = 0; i < 2; ++i) {
      std::string error;
      CHECK(Get(rank, &error) == nullptr);
      if (!Has(error, expected)) std::fprintf(stderr, "rank %d: %s\n", rank.rank, error.c_str());
      CHECK(Has(error, expected));
    }
  });
}

ALONE_TEST_CASE("what can't work is refused") {
  Communicator::Configure(20, 4);
  auto* nodes = new World(2);
  nodes->num_lsa_teams = 2;
  nodes->split_fails = true;
  Refused(nodes, "ncclGetUniqueId");
  auto* plain = new World(2);
  plain->device_api = false;
  Refused(plain, "have no windows");
  auto* null = new World(2);
  null->windows = false;
  Refused(null, "NCCL gave no window");
  Refused(new World(3), "rank 2 of the group has no 2097152 bytes of GPU memory left for the signals",
          {"ncclMemAlloc"});
  // The rank that has none adds NCCL's reason.
  OnRanks(*new World(3), [](Rank& rank) {
    if (rank.rank == 2) fault = {"ncclMemAlloc"};
    std::string error;
    CHECK(Get(rank, &error) == nullptr);
    const std::string end = rank.rank == 2 ? "MEM_FRACTION (ncclMemAlloc: failed)" : "XLA_PYTHON_CLIENT_MEM_FRACTION";
    CHECK(error.size() > end.size() && error.substr(error.size() - end.size()) == end);
  });
  auto* uneven = new World(3);
  uneven->spacing_error = 64;
  Refused(uneven, "not equally spaced");
  Communicator::Configure(20, 1000);
  Refused(new World(1), "JAXCOMM_MAX_SMS is 1000, but GPU 0 has 132 SMs");
}

// Each exchange between ranks fails once, on all of them.
ALONE_TEST_CASE("an exchange that fails ends what needs it") {
  Communicator::Configure(20, 4);
  int num_failed = 0;
  for (bool reached = true; reached;) {
    auto* world = new World(1);
    world->multimem = true;
    OnRanks(*world, [&](Rank& rank) {
      fault = {"ncclAllGather", num_failed};
      std::string error;
      if (Communicator* const communicator = Get(rank, &error)) {
        CallSpec spec = SpecOf(Collective::kAllReduce, 1);
        for (const char* algorithm : {"direct", "multimem"}) {
          spec.algorithm = algorithm;
          if (!DeviceCall::Make(spec, *communicator, DType::kF32, 1000, 1000, &error)) break;
        }
      }
      reached = fault.skipped < 0;
      CHECK(error == (reached ? "ncclAllGather: failed" : ""));
    });
    if (reached) ++num_failed;
  }
  CHECK(num_failed > 12);
}

ALONE_TEST_CASE("a GPU that can't be chosen is an error") {
  Communicator::Configure(20, 4);
  OnRanks(*new World(1), [](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    device::Window arena;
    device::Comm comm;
    int64_t bytes = 0;
    const auto refused = [&](auto call) {
      fault = {"cudaSetDevice"};
      error.clear();
      return !call() && error == "cudaSetDevice: failed";
    };
    CHECK(refused([&] { return communicator.Reserve(1, &arena, &bytes, &error); }));
    CHECK(refused([&] { return communicator.ReserveFor("mine", 1, &comm, &error); }));
    CHECK(refused([&] { return communicator.IsSameOnAllRanks("a", 1, &error); }));
    CHECK(refused([&] { return communicator.AllDone("here", true, &error); }));
    CHECK(communicator.Reserve(1, &arena, &bytes, &error));
  });
}

ALONE_TEST_CASE("ranks whose programs differ are told so") {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    device::Window arena;
    int64_t bytes = 0;
    CHECK(!communicator.Reserve(int64_t{40 + 8 * rank.rank} << 20, &arena, &bytes, &error));
    CHECK(Has(error, "their programs differ"));
    CallSpec spec = SpecOf(Collective::kAllReduce, 2);
    spec.max_sms = 2 + rank.rank;
    for (const int64_t count : {1 << 22, 3000}) {  // a plan, LL messages
      CHECK(DeviceCall::Make(spec, communicator, DType::kF32, count, count, &error) == nullptr);
      CHECK(Has(error, "(max_sms) must be the same on all ranks, but is " + std::to_string(3 - rank.rank) +
                           " on rank " + std::to_string(1 - rank.rank)));
    }
  });
}

// Settings of the environment. Rank 1 gets others when rank 0 has read its own.
ALONE_TEST_CASE("ranks whose settings differ are told so") {
  struct Settings {
    int32_t channels;
    bool windows;
  };
  const auto differ = [](Settings of_0, Settings of_1, const std::string& on_0, const std::string& on_1) {
    Communicator::Configure(20, of_0.channels, "", of_0.windows);
    auto* world = new World(2);
    OnRanks(*world, [&](Rank& rank) {
      if (rank.rank == 1) {
        Until(world->mutex, [&] { return world->gathers[0].num_arrived == 1; });
        Communicator::Configure(20, of_1.channels, "", of_1.windows);
      }
      for (int i = 0; i < 2; ++i) {
        std::string error;
        CHECK(Get(rank, &error) == nullptr);
        CHECK(Has(error, rank.rank == 0 ? on_0 : on_1));
      }
    });
  };
  differ({4, true}, {5, true}, "JAXCOMM_MAX_SMS must be the same on all ranks, but is 5 on rank 1 and 4 on rank 0",
         "JAXCOMM_MAX_SMS must be the same on all ranks, but is 4 on rank 0 and 5 on rank 1");
  differ({4, true}, {4, false},
         "JAXCOMM_SYMMETRIC_BUFFERS must be the same on all ranks, but is 0 on rank 1 and 1 on rank 0",
         "JAXCOMM_SYMMETRIC_BUFFERS must be the same on all ranks, but is 1 on rank 0 and 0 on rank 1");
}

ALONE_TEST_CASE("a rank that does not come is not waited for without end") {
  Communicator::Configure(0.2, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    if (rank.rank == 1) return;
    std::string error;
    CHECK(Get(rank, &error) == nullptr);
    CHECK(Has(error, "did not come within 0.2 s (JAXCOMM_TIMEOUT_S)"));
  });
}

// What it has sent may be there when the other one comes, who then goes on.
ALONE_TEST_CASE("ranks that did not meet don't go on as if they had") {
  Communicator::Configure(0.2, 4);
  auto* world = new World(2);
  std::atomic<int> turn{0};
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    Communicator& other = *Get(*new Rank{new World(1), 0}, &error);
    if (rank.rank == 1) {
      while (turn < 1) std::this_thread::yield();
      CHECK(communicator.IsSameOnAllRanks("a", 1, &error));
      return;
    }
    CHECK(!communicator.IsSameOnAllRanks("a", 1, &error));
    const std::string late = "the other ranks of the group of 2 did not come within 0.2 s";
    CHECK(Has(error, late));
    turn = 1;
    const int before = rank.num_gathers;
    device::Window arena;
    int64_t bytes = 0;
    for (int i = 0; i < 2; ++i) {
      CHECK(!communicator.IsSameOnAllRanks("b", 1, &error) && Has(error, "ranks did not meet before: " + late));
      CHECK(!communicator.Reserve(1, &arena, &bytes, &error) && Has(error, "ranks did not meet before: " + late));
      CHECK(!communicator.AllDone("here", true, &error) && Has(error, "ranks did not meet before: " + late));
      CHECK(Has(communicator.Failure(), late));
    }
    CHECK(rank.num_gathers == before);
    CHECK(other.Failure().empty());
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
