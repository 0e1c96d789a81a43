// Communicators of one machine or of GIN: which there are, what calls share of one, in what order they run.
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
    auto* world = new World(n);
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      Communicator* const communicator = Get(rank, &error);
      CHECK(communicator != nullptr && communicator->rank() == rank.rank && communicator->size() == n);
      CHECK(communicator->max_channels() == 4 && communicator->device() == rank.rank);
      CHECK(Get(rank, &error) == communicator);
      Sum(*communicator, 1);
      CHECK(rank.num_allocations == 1);  // small calls need no arena
      Sum(*communicator, 1000);
      CHECK(rank.num_ll == 4);
      Sum(*communicator, 40000);  // several channels
      Sum(*communicator, 1000);
      CHECK(rank.num_ll == 6);
      device::Window small, large, again;
      int64_t bytes = 0;
      CHECK(communicator->Reserve(1, &small, &bytes, &error));
      const int before = rank.num_allocations;
      CHECK(communicator->Reserve(1000, &again, &bytes, &error) && again.base == small.base);
      CHECK(rank.num_allocations == before);
      // An arena that is too small stays where it is, for those who have it. All of them take less than the newest one.
      const int64_t of_small = bytes;
      CHECK(communicator->Reserve(bytes + 1, &large, &bytes, &error) && rank.num_allocations == before + 1);
      CHECK(bytes >= 2 * of_small);
      CHECK(large.base != small.base);
      CHECK(communicator->Reserve(bytes, &again, &bytes, &error) && again.base == large.base);
      Sum(*communicator, 1000);
      CHECK(communicator->Failure().empty());
    });
  }
}

TEST_CASE("memory comes in whole pages of 2 MiB") {
  CHECK(WholePages(0) == 0 && WholePages(1) == 2 << 20 && WholePages(2 << 20) == 2 << 20);
  CHECK(WholePages((2 << 20) + 1) == 4 << 20 && WholePages((4 << 20) - 1) == 4 << 20);
}

// For all ranks or for none.
ALONE_TEST_CASE("multicast addresses") {
  Communicator::Configure(20, 4, "");
  const auto has_address = [](bool multimem, int without_support, int without_address) {
    auto* world = new World(3);
    world->multimem = multimem;
    world->rank_without_multimem = without_support;
    world->rank_without_multicast = without_address;
    std::vector<char*> bases(3);
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      device::Comm comm;
      CHECK(Get(rank, &error)->ReserveFor("mine", 100, &comm, &error));
      CHECK(comm.arena_bytes >= 100 && comm.arena.At(0) != nullptr);
      const int64_t of_first = comm.arena_bytes;
      CHECK(Get(rank, &error)->ReserveFor("mine", of_first + 1, &comm, &error) && comm.arena_bytes >= 2 * of_first);
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

// Of two groups, this process (number 3) has all GPUs of the second one.
const std::vector<Member> kMembers = {{2, 1}, {2, 0}, {3, 1}, {3, 0}};

ALONE_TEST_CASE("communicators of our own") {
  Communicator::Configure(20, 4);
  XLA_FFI_Api old = {};
  old.struct_size = xla_abi::kFindExtensionOffset;  // as jaxlib 0.10.2 has it
  const XlaCollectives lends_none(&old, nullptr);
  const std::vector<int64_t> ids = {0, 1, 2, 3};
  const DeviceGroups groups(ids, 2);
  CHECK(Has(RequestCommunicator(lends_none, groups, {}), "0.11.2 or later"));
  CHECK(RequestCommunicator(lends_none, groups, kMembers).empty());
  ncclComm_t none = nullptr;
  CHECK(Has(OwnCommunicators::Get(kMembers, 2, 5, &none), "not one of those that the call was compiled for"));
  auto* world = new World(2);
  OwnCommunicators::Add(3, {kMembers[2], kMembers[3]}, KeyOf(world));
  OwnCommunicators::Add(3, {kMembers[2], kMembers[3]}, KeyOf(new World(7)));  // the first counts
  OnRanks(*world, [&](Rank& rank) {
    const int32_t device = 1 - rank.rank;  // ranks are as the group has them
    for (int i = 0; i < 2; ++i) {
      ncclComm_t nccl_comm = nullptr;
      CHECK(GetCommunicator(lends_none, groups, kMembers, device, &nccl_comm).empty());
      CHECK(nccl_comm == reinterpret_cast<ncclComm_t>(&rank));
    }
    std::string error;
    Sum(*Get(rank, &error), 100);
  });
  CHECK(world->num_made == 2 && world->num_aborted == 0);
  CHECK(Has(OwnCommunicators::Get({{3, 0}, {3, 2}}, 2, 2, &none), "this process has not compiled the call"));

  Communicator::Configure(0.1, 4);
  auto* late = new World(2);
  OwnCommunicators::Add(3, {{3, 0}, {4, 0}}, KeyOf(late));
  OnRanks(*late, [&](Rank& rank) {
    if (rank.rank == 1) return;
    for (int i = 0; i < 2; ++i) {
      ncclComm_t nccl_comm = nullptr;
      CHECK(Has(OwnCommunicators::Get({{3, 0}, {4, 0}}, 2, 0, &nccl_comm), "did not come to make its communicator"));
      CHECK(nccl_comm == nullptr);
    }
  });
  CHECK(late->num_made == 1 && late->num_aborted == 1);
}

ALONE_TEST_CASE("calls on two streams follow each other") {
  Communicator::Configure(20, 4);
  auto* world = new World(1);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    Stream one, other, captured;
    captured.captures = true;
    CHECK(communicator.Begin(one.handle()).empty() && communicator.End(one.handle()).empty());
    CHECK(communicator.Begin(one.handle()).empty() && one.num_waits == 0);
    CHECK(one.num_records == 1);
    CHECK(communicator.Begin(other.handle()).empty() && other.num_waits == 1 &&
          communicator.End(other.handle()).empty());
    CHECK(communicator.Begin(one.handle()).empty() && one.num_waits == 1);
    // What is captured waits for nothing, and nothing for it.
    CHECK(communicator.Begin(captured.handle()).empty() && communicator.End(captured.handle()).empty());
    CHECK(captured.num_waits == 0 && captured.num_records == 0);
    CHECK(communicator.Begin(other.handle()).empty() && other.num_waits == 1);
    // Each call does so.
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 1), communicator, DType::kS32, 8, 8, &error);
    int32_t x[8] = {}, y[8];
    CHECK(call->Launch(x, y, one.handle()).empty() && one.num_waits == 2 && one.num_records == 2);
  });
}

// One communicator for NVLink inside of nodes and for GIN between them.
ALONE_TEST_CASE("GIN between nodes, NVLink inside") {
  for (const auto& [n, nodes] : {std::pair{2, 2}, std::pair{4, 2}, std::pair{6, 3}}) {
    Communicator::Configure(20, 4, "");
    auto* world = new World(n);
    world->num_lsa_teams = nodes;
    world->gin = NCCL_GIN_TYPE_GDAKI;
    world->split_fails = true;  // nobody wants other communicators
    OnRanks(*world, [&, n = n](Rank& rank) {
      std::string error;
      Communicator* const communicator = Get(rank, &error);
      CHECK(communicator != nullptr && communicator->gin() != nullptr && communicator->send_recv_proxy() == nullptr);
      CHECK(communicator->placement().ranks_per_node == world->team_size() && rank.num_gin == 1);
      Sum(*communicator, 1);
      Sum(*communicator, 1000);
      Sum(*communicator, 40000);  // several channels
      device::Window larger;
      int64_t bytes = 0;
      CHECK(communicator->Reserve(1, &larger, &bytes, &error) &&
            communicator->Reserve(bytes + 1, &larger, &bytes, &error));
      Sum(*communicator, 1000);  // in the new arena
      const CallSpec spec = SpecOf(Collective::kBarrier, n);
      const auto barrier = DeviceCall::Make(spec, *communicator, DType::kS32, 0, 0, &error);
      Stream stream;
      CHECK(barrier != nullptr && barrier->Launch(nullptr, nullptr, stream.handle()).empty());
      while (!stream.Drain()) std::this_thread::yield();
      CHECK(communicator->Failure().empty());
    });
  }
}

// GIN is for all ranks or for none. Without it, each node gets a communicator, which here NCCL refuses.
ALONE_TEST_CASE("GIN for all ranks or for none") {
  Communicator::Configure(20, 4, "");
  for (const bool on_rank_1 : {true, false}) {
    auto* world = new World(4);
    world->num_lsa_teams = 2;
    world->gin = on_rank_1 ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_NONE;
    world->rank_without_gin = 1;
    world->split_fails = true;
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      CHECK(Get(rank, &error) == nullptr && Has(error, "ncclGetUniqueId"));
      CHECK(rank.num_gin == 0);
    });
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
