// Communicators of one machine or with GIN: their creation, the state that calls share, and the order of calls.
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/cuda/runtime/own_communicators.h"
#include "fakes/machine.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

ALONE_TEST_CASE("calls share a communicator") {
  for (const int n : {1, 2, 3}) {
    Communicator::Configure(20, 4);
    OnRanks(*new World(n), [&](Rank& rank) {
      Communicator* const communicator = ValueOf(Get(rank));
      CHECK(communicator != nullptr && communicator->rank() == rank.rank && communicator->size() == n);
      CHECK(communicator->max_channels() == 4 && communicator->device() == rank.device());
      CHECK(ValueOf(Get(rank)) == communicator);
      Sum(*communicator, 1);
      CHECK(rank.num_allocations == 1);  // small calls need no arena
      Sum(*communicator, 1000);
      CHECK(rank.num_ll == 4);
      Sum(*communicator, 40000);  // several channels
      Sum(*communicator, 1000);
      CHECK(rank.num_ll == 6);
      device::Window small, large, again;
      int64_t bytes = 0;
      CHECK(communicator->Reserve(1, &small, &bytes).ok());
      const int before = rank.num_allocations;
      CHECK(communicator->Reserve(1000, &again, &bytes).ok() && again.base == small.base);
      CHECK(rank.num_allocations == before);
      // An arena that is too small keeps its address for the calls that use it. Together, the old ones take less memory
      // than the newest one.
      const int64_t of_small = bytes;
      CHECK(bytes == 32 << 20);
      CHECK(communicator->Reserve(bytes + 1, &large, &bytes).ok() && rank.num_allocations == before + 1);
      CHECK(bytes >= 2 * of_small);
      CHECK(large.base != small.base);
      CHECK(communicator->Reserve(bytes, &again, &bytes).ok() && again.base == large.base);
      Sum(*communicator, 1000);
      CHECK(communicator->Failure().ok());
    });
  }
}

// Other kernels, such as XLA's collectives, find free SMs on every GPU of the group.
ALONE_TEST_CASE("the smallest GPU of the group limits the channels of all") {
  const auto channels = [](int32_t limit, const std::vector<int>& sms) {
    Communicator::Configure(20, limit);
    const auto n = static_cast<int>(sms.size());
    std::vector<int32_t> found(n);
    OnRanks(*new World(n), [&](Rank& rank) {
      num_sms = sms[rank.rank];
      Communicator& communicator = *ValueOf(Get(rank));
      found[rank.rank] = communicator.max_channels();
      Sum(communicator, 40000);
    });
    for (const int32_t of_rank : found) CHECK(of_rank == found[0]);
    return found[0];
  };
  CHECK(channels(32, {132, 132}) == 32);
  CHECK(channels(1000, {132, 132}) == 92);
  CHECK(channels(32, {132, 58, 142}) == 20);
  CHECK(channels(8, {58, 132}) == 8);
  CHECK(channels(32, {36, 33}) == 1 && channels(32, {20}) == 1);
}

// All ranks have one, or none has.
ALONE_TEST_CASE("multicast addresses") {
  Communicator::Configure(20, 4, "");
  const auto has_address = [](bool multimem, int without_support, int without_address) {
    auto* world = new World(3);
    world->multimem = multimem;
    world->rank_without_multimem = without_support;
    world->rank_without_multicast = without_address;
    std::vector<char*> bases(3);
    OnRanks(*world, [&](Rank& rank) {
      Communicator* const communicator = ValueOf(Get(rank));
      device::Comm comm;
      CHECK(communicator->ReserveFor("mine", 100, &comm).ok());
      CHECK(comm.arena_bytes >= 100 && comm.arena.At(0) != nullptr);
      const int64_t of_first = comm.arena_bytes;
      CHECK(communicator->ReserveFor("mine", of_first + 1, &comm).ok() && comm.arena_bytes >= 2 * of_first);
      bases[rank.rank] = comm.arena_multicast.base;
    });
    CHECK(bases[0] == bases[1] && bases[1] == bases[2]);
    return reinterpret_cast<uintptr_t>(bases[0]) > kMulticast;
  };
  CHECK(has_address(true, -1, -1));
  CHECK(!has_address(true, -1, 1));
  CHECK(!has_address(true, 2, -1));
  CHECK(!has_address(false, -1, -1));
}

ALONE_TEST_CASE("a multicast address that NCCL never gives is an error in time") {
  Communicator::Configure(0.2, 4);
  auto* const world = new World(2);
  world->multimem = world->multicast_hangs = true;
  OnRanks(*world, [](Rank& rank) {
    device::Comm comm;
    const Status failed = ValueOf(Get(rank))->ReserveFor("mine", 100, &comm);
    CHECK(Has(failed, "ncclGetLsaMultimemDevicePointer was not over within 0.2 s (JAXCOMM_TIMEOUT_S)"));
  });
}

ALONE_TEST_CASE("calls on two streams follow each other") {
  Communicator::Configure(20, 4);
  OnRanks(*new World(1), [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    Stream one, other, captured;
    captured.captures = true;
    CHECK(communicator.Begin(one.handle()).ok() && communicator.End(one.handle()).ok());
    CHECK(communicator.Begin(one.handle()).ok() && one.num_waits == 0);
    CHECK(one.num_records == 1);
    CHECK(communicator.Begin(other.handle()).ok() && other.num_waits == 1 && communicator.End(other.handle()).ok());
    CHECK(communicator.Begin(one.handle()).ok() && one.num_waits == 1);
    // A captured call waits for nothing, and nothing waits for it.
    CHECK(communicator.Begin(captured.handle()).ok() && communicator.End(captured.handle()).ok());
    CHECK(captured.num_waits == 0 && captured.num_records == 0);
    CHECK(communicator.Begin(other.handle()).ok() && other.num_waits == 1);
    // Each call does so.
    const auto call = ValueOf(DeviceCall::Make(SpecOf(Collective::kAllReduce, 1), communicator, DType::kS32, 8, 8));
    int32_t x[8] = {}, y[8];
    CHECK(call->Launch(x, y, one.handle()).ok() && one.num_waits == 2 && one.num_records == 2);
  });
}

// One communicator for NVLink inside of nodes and for GIN between them.
ALONE_TEST_CASE("GIN between nodes, NVLink inside") {
  for (const auto& [n, nodes] : {std::pair{2, 2}, std::pair{4, 2}, std::pair{6, 3}}) {
    Communicator::Configure(20, 4, "");
    World* const world = &NodesOf(nodes, n / nodes, NCCL_GIN_TYPE_GDAKI);
    OnRanks(*world, [&, n = n](Rank& rank) {
      Communicator* const communicator = ValueOf(Get(rank));
      CHECK(communicator != nullptr && communicator->gin() != nullptr);
      CHECK(communicator->placement().ranks_per_node == world->team_size() && rank.num_gin == 1);
      Sum(*communicator, 1);
      Sum(*communicator, 1000);
      Sum(*communicator, 40000);  // several channels
      device::Window larger;
      int64_t bytes = 0;
      CHECK(communicator->Reserve(1, &larger, &bytes).ok() && communicator->Reserve(bytes + 1, &larger, &bytes).ok());
      Sum(*communicator, 1000);  // in the new arena
      const CallSpec spec = SpecOf(Collective::kBarrier, n);
      const auto barrier = ValueOf(DeviceCall::Make(spec, *communicator, DType::kS32, 0, 0));
      Stream stream;
      const auto copies =
          ValueOf(DeviceCall::Make(SpecOf(Collective::kAllReduce, n), *communicator, DType::kS32, 40000, 40000, true));
      CHECK(copies->ExchangeOffsets(nullptr, nullptr, {}, {}, stream.handle()).ok() && stream.queue.empty());
      CHECK(barrier != nullptr && barrier->Launch(nullptr, nullptr, stream.handle()).ok());
      while (!stream.Drain()) std::this_thread::yield();
      CHECK(communicator->Failure().ok());
    });
  }
}

// Without GIN, plans can't run between nodes. The error names the remedy.
ALONE_TEST_CASE("GIN for all ranks, or an error on all") {
  Communicator::Configure(20, 4, "");
  const std::string begin = "the group's GPUs are of several nodes of 2 ranks, and there is no GIN between them: ";
  const std::string end =
      "; pass algorithm=\"xla\" or \"xla_hierarchical\", or call kernels of your own over the ranks of a node";
  const std::string off = "NCCL offers no GIN on this network (NCCL_DEBUG=INFO shows its reason)";
  for (const bool on_rank_1 : {true, false}) {
    World& world = NodesOf(2, 2, on_rank_1 ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_NONE);
    world.rank_without_gin = 1;
    OnRanks(world, [&](Rank& rank) {
      const std::string other = "rank 1 of the group failed when it prepared GIN; its error says why";
      CHECK(Get(rank).status().message() == begin + (on_rank_1 && rank.rank != 1 ? other : off) + end);
      CHECK(rank.num_gin == 0);
    });
  }
}

// JAXCOMM_NODE_ID. NCCL's teams of ranks that address each other's memory must agree with the names.
ALONE_TEST_CASE("names of processes determine the nodes") {
  struct Case {
    const char* names;
    int num_lsa_teams;
    int ranks_per_node;
    bool is_right;
  };
  for (const Case& test : {Case{"aabb", 2, 2, true},
                           {"aaaa", 1, 4, true},
                           {"aabb", 1, 2, false},
                           {"abab", 1, 1, false},
                           {"aaab", 1, 1, false},
                           {"abcd", 2, 1, false},
                           {"abcd", 4, 1, true}}) {
    std::atomic<int> turn{0};
    OnRanks(NodesOf(test.num_lsa_teams, 4 / test.num_lsa_teams), [&](Rank& rank) {
      // The name belongs to the process, so each rank sets its own while it reads the name.
      std::thread next;
      after_init = [&] {
        while (turn < rank.rank) std::this_thread::yield();
        Communicator::Configure(20, 4, std::string(1, test.names[rank.rank]));
        next = std::thread([&] {
          while (!*rank.made->asked) std::this_thread::yield();
          ++turn;
        });
      };
      const StatusOr<Communicator*> made = Get(rank);
      next.join();
      CHECK(made.ok() == test.is_right);
      if (made.ok()) CHECK((*made)->placement().ranks_per_node == test.ranks_per_node);
      const std::string nodes = "several nodes of " + std::to_string(test.ranks_per_node) + " ranks";
      if (!made.ok()) CHECK(Has(made.status(), nodes) && Has(made.status(), "its nodes are not NCCL's teams"));
    });
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
