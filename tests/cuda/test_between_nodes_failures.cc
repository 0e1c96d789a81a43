// Calls that fail: between nodes without GIN, missing and late ranks, aborted kernels, full queues; a missing rank of a
// started call.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "between_nodes.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include "fakes/emulation.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

ALONE_TEST_CASE("programs that differ are an error") {
  Communicator::Configure(kLong, 3);
  OnRanks(Hosts(2, 1), [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32,
                                       100 + rank * 900, 100 + rank * 900);
    CHECK(Has(call.status(), "their programs differ"));
  });
}

// Errors of a call that rank 3 does not reach. Rank 1 waits for its messages and rank 2 for its signals. Rank 0 waits
// for data that these two no longer send.
ALONE_TEST_CASE("a missing rank is an error on all others") {
  Communicator::Configure(3, 3);
  OnRanks(Hosts(2, 2), [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call = Ok(Sum(communicator, 100));
    if (rank == 3) return;
    std::vector<int32_t> x(100), y(100);
    Stream& stream = OwnStream();
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    Until([&] { return stream.num_running == 0; });
    std::string failure;
    for (int i = 0; failure.empty() && i < 3000; ++i) {
      failure = communicator.Failure().message();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (failure.empty()) std::fprintf(stderr, "rank %d has not failed\n", rank);
    CHECK(Has(failure, "all_reduce at here.py:1: rank " + std::to_string(rank) + " aborted "));
    CHECK(Has(failure, "within 3 s (JAXCOMM_TIMEOUT_S)"));
    if (rank == 1) CHECK(Has(failure, "in round 0 of the messages between nodes: rank 3 did not come"));
    if (rank == 2) CHECK(Has(failure, "in the entry barrier: rank 3 did not signal"));
    // Later calls say so, and put nothing on a stream.
    CHECK(!call->Launch(x.data(), y.data(), stream.handle()).ok() || Has(communicator.Failure(), "aborted"));
    Until([&] { return stream.num_running == 0; });
  });
}

// The kernel of a started call has the deadline of all others. Its failure ends the calls of both lanes.
ALONE_TEST_CASE("a missing rank of a started call is an error") {
  Communicator::Configure(3, 3);
  OnRanks(Hosts(1, 3), [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    Communicator& lane = *Ok(communicator.AsynchronousLane());
    const CallSpec spec = SpecOf(Collective::kAllReduce, 3, "direct");
    const auto call = Ok(DeviceCall::Make(spec, lane, DType::kS32, 100, 100));
    if (rank == 2) return;
    std::vector<int32_t> x(100), y(100);
    Stream& stream = OwnStream();
    stream.Push([] { emulation::TheMachine().switch_ns = 1'000'000; });  // seconds pass soon
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    Until([&] { return stream.num_running == 0; });
    const std::string failure = lane.Failure().message();
    CHECK(Has(failure, "all_reduce at here.py:1: rank " + std::to_string(rank) + " aborted "));
    CHECK(Has(failure, "did not signal within 3 s (JAXCOMM_TIMEOUT_S)"));
    CHECK(!lane.CheckUsable().ok() && !communicator.CheckUsable().ok());
  });
}

// Rank 3 reaches a call after all others have aborted and have further runs enqueued. The operands that they copied to
// the arena for the call are still there, and the runs only see each other's failure.
ALONE_TEST_CASE("runs after an aborted call do not write operands") {
  Communicator::Configure(3, 3);
  std::atomic<int> num_over{0};
  OnRanks({Hosts(2, 2)}, [&](ncclComm_t comm, int rank) {
    constexpr int64_t kCount = 9001;
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call = Ok(Sum(communicator, kCount));
    CHECK(call && call->shares_input());
    device::Window arena;
    int64_t bytes;
    CHECK(communicator.Reserve(1, &arena, &bytes).ok());
    const auto* in_arena = arena.At<int32_t>(communicator.comm().local.rank);  // where the operand begins
    Stream& stream = OwnStream();
    std::vector<std::vector<int32_t>> x;
    std::vector<int32_t> y(kCount);
    for (int run = 0; run < 4; ++run) x.emplace_back(kCount, 1000 * run + rank);
    const auto launch = [&](int run) { return call->Launch(x[run].data(), y.data(), stream.handle()); };
    CHECK(launch(0).ok());
    Until([&] { return stream.num_running == 0; });
    CHECK(y == std::vector<int32_t>(kCount, 6) && in_arena[kCount - 1] == rank);
    if (rank == 3) {
      while (num_over < 3) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      CHECK(launch(1).ok());
      Until([&] { return stream.num_running == 0; });
    } else {
      for (int run = 1; run < 4; ++run) CHECK(launch(run).ok());
      Until([&] { return stream.num_running == 0; });
      ++num_over;
    }
    CHECK(std::equal(x[1].begin(), x[1].end(), in_arena));
    std::string failure;
    for (int i = 0; failure.empty() && i < 3000; ++i) {
      failure = communicator.Failure().message();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(!failure.empty());
  });
}

// The late call's peers are removed with it.
ALONE_TEST_CASE("a call that is late when it ends is still an error") {
  Communicator::Configure(3, 3);
  OnRanks({Hosts(2, 1)}, [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    auto call = Ok(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 9, 9));
    if (rank == 1) return;
    std::vector<int32_t> x(9), y(9);
    Stream& stream = OwnStream();
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    before_free = [&] { Until([&] { return stream.num_running == 0; }); };  // as CUDA does
    call.reset();
    before_free = nullptr;
    CHECK(Has(communicator.Failure(), "in round 0 of the messages between nodes: other nodes did not come within 3 s"));
  });
}

ALONE_TEST_CASE("an idle communicator does not time out") {
  Communicator::Configure(3, 3);
  OnRanks({Hosts(2, 1)}, [&](ncclComm_t comm, int) {
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call =
        Ok(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 100, 100));
    Stream& stream = OwnStream();
    for (int run = 0; run < 2; ++run) {
      std::vector<int32_t> x(100, 1 + run), y(100);
      if (run > 0) std::this_thread::sleep_for(std::chrono::seconds(4));
      CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
      Until([&] { return stream.num_running == 0; });
      CHECK(y == std::vector<int32_t>(100, 2 + 2 * run));
      CHECK(communicator.Failure().ok());
    }
  });
}

// The abort happens on the GPU of rank 0, on another communicator. The data that it would send to the other node is
// undefined.
ALONE_TEST_CASE("a GPU with an aborted kernel sends nothing") {
  Communicator::Configure(3, 3);
  OnRanks({Hosts(2, 1)}, [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call =
        Ok(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 100, 100));
    std::vector<int32_t> x(100, 1), y(100);
    Stream& stream = OwnStream();
    if (rank == 0) device::SetAbortFlag(communicator.comm());
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    Until([&] { return stream.num_running == 0; });
    std::string failure;
    for (int i = 0; failure.empty() && i < 3000; ++i) {
      failure = communicator.Failure().message();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(Has(failure, rank == 0 ? "all_reduce at here.py:1: has sent nothing to other nodes"
                                 : "in round 0 of the messages between nodes: rank 0 did not come"));
  });
}

// Rank 1 does not arrive. Rank 0 starts calls until CUDA accepts no more launches, before the stalled round has been
// aborted. The blocked launch is that of a kernel or, if `in_nccl`, one of NCCL's.
void AFullQueueOfLaunches(bool in_nccl) {
  Communicator::Configure(3, 3);
  OnRanks({Hosts(2, 1)}, [&](ncclComm_t comm, int rank) {
    Communicator& communicator = *Ok(fake::Get(comm));
    const auto call =
        Ok(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 100, 100));
    if (rank == 1) return;
    std::vector<int32_t> x(100), y(100);
    Stream& stream = OwnStream();
    const auto launch = [&] { return call->Launch(x.data(), y.data(), stream.handle()); };
    CHECK(launch().ok());
    (in_nccl ? before_group : before_launch) = [] {
      const auto begin = std::chrono::steady_clock::now();
      while (num_aborted + num_revoked == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));  // the round is never aborted
      }
    };
    CHECK(Has(launch(), "NCCL's communicator has been aborted"));  // in this round, or before the next
    Until([&] { return stream.num_running == 0; });
    for (int i = 0; num_aborted == 0 && i < 500; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(num_aborted == 1 && num_revoked == (in_nccl ? 1 : 0));
    CHECK(Has(communicator.Failure(), "in round 0 of the messages between nodes: rank 1 did not come"));
  });
}

ALONE_TEST_CASE("a full queue of launches does not keep a round from being aborted") { AFullQueueOfLaunches(false); }

ALONE_TEST_CASE("a full queue of launches in NCCL does not keep a round from being aborted") {
  AFullQueueOfLaunches(true);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
