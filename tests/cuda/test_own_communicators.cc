// Communicators of jaxcomm's own: XLA may destroy and replace the communicators that led to them.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../ffi/cuda/nccl/device_memory.h"
#include "../../ffi/cuda/nccl/first_contact.h"
#include "../../ffi/cuda/runtime/own_communicators.h"
#include "fakes/machine.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// A call site on one GPU, in XLA's stages.
struct Site {
  Site(GpuCallState& state, Rank& rank, int device) : xla(state, stream.handle(), device, &rank) {}
  void Begin(int32_t* x, int32_t* y) {
    ++xla.run;
    xla.Use(x, kCount, y, kCount);
    CHECK(xla.Prepare().empty());
    CHECK(xla.num_communicators == 1);  // in every run: XLA locks it
    CHECK(xla.Initialize().empty());
  }
  Communicator& communicator(int device) {
    return static_cast<GpuCallState*>(xla.state)->calls.at(device)->communicator();
  }

  static constexpr int64_t kCount = 500;
  Stream stream;
  FakeXla xla;
};

void Fill(int32_t* x, int32_t* y, int device, int run) {
  for (int64_t i = 0; i < Site::kCount; ++i) x[i] = static_cast<int32_t>(1000 * device + i + run), y[i] = -1;
}
void CheckSum(const int32_t* y, int n, int run) {
  for (int64_t i = 0; i < Site::kCount; ++i) CHECK(y[i] == 1000 * n * (n - 1) / 2 + n * (i + run));
}

// XLA's communicator of the same GPUs is destroyed while a CUDA graph of the call is cached. The next one has another
// address, or the same one; `reversed`: it is of a group of the same GPUs in another order, and another call site uses
// it. `windows`: XLA's windows go with it. A graph holds nothing of them: it reads their places where each run writes
// them.
void Replace(bool same_address, bool reversed, bool windows = false) {
  constexpr int kRanks = 3;
  Communicator::Configure(20, 4);
  auto* const first = new World(kRanks);
  auto* const second = new World(kRanks);
  const CallSpec spec = SpecOf(Collective::kAllReduce, kRanks, "direct");
  GpuCallState *const state = StateOf(spec, windows), *const other = StateOf(spec, windows);
  pthread_barrier_t meeting;
  CHECK(pthread_barrier_init(&meeting, nullptr, kRanks) == 0);
  OnRanks(*first, [&](Rank& of_xla) {
    const int device = of_xla.number = of_xla.rank;
    Site site(*state, of_xla, device);
    std::vector<int32_t> operand(Site::kCount), result(Site::kCount);
    int32_t *x = operand.data(), *y = result.data();
    std::optional<XlaMemory> memory;
    if (windows) memory.emplace(of_xla).GiveTo(site.xla);
    const auto fill = [&](int run) {
      if (windows) x = memory->At(memory->InputOf(run)), y = memory->At(memory->OutputOf(run));
      Fill(x, y, device, run);
    };
    const auto check = [&](int run, Stream& stream) {
      fake::Wait(stream.handle());
      CheckSum(y, kRanks, run);
    };
    fill(0);
    site.Begin(x, y);
    CHECK(site.xla.Execute().empty());
    check(0, site.stream);
    const DeviceCall* const call = state->calls.at(device).get();
    Stream graph;
    graph.captures = true;
    site.Begin(x, y);
    site.xla.stream = graph.handle();
    CHECK(site.xla.Execute().empty());
    site.xla.stream = site.stream.handle();
    CHECK(graph.graph.size() == (windows ? 2 : 1));  // the exchange of offsets, the plan

    pthread_barrier_wait(&meeting);
    Destroy(of_xla);
    pthread_barrier_wait(&meeting);
    Rank& next = same_address ? of_xla : *Keep(std::make_unique<Rank>());
    next = Rank{};
    next.world = second;
    next.rank = reversed ? kRanks - 1 - device : device;
    next.number = device;
    own = &next;
    Site new_site(*other, next, device);
    if (windows) {
      memory.emplace(next).GiveTo(site.xla);
      memory->GiveTo(new_site.xla);
    }
    if (!reversed) site.xla.nccl_comm = &next;
    for (int run = 2; run < 4; ++run) {
      fill(run);
      if (reversed) {
        CHECK(site.xla.Initialize().empty());
      } else {
        site.Begin(x, y);
      }
      CHECK(state->calls.at(device).get() == call);
      Replay(graph, site.stream.handle());
      check(run, site.stream);
      fill(10 + run);
      new_site.Begin(x, y);
      CHECK(new_site.xla.Execute().empty());
      check(10 + run, new_site.stream);
    }
    const Communicator& of_new = new_site.communicator(device);
    CHECK((&of_new == &call->communicator()) == !reversed);
    CHECK(of_new.rank() == next.rank && call->communicator().rank() == device);
  });
}

TEST_CASE("XLA replaces its communicator under a cached CUDA graph") {
  for (const bool same_address : {false, true}) {
    Alone([&] { Replace(same_address, false); });
    Alone([&] { Replace(same_address, true); });
  }
  Alone([] { Replace(false, false, true); });
}

// Two programs over the same GPUs share a communicator. The order of the ranks, and another incarnation of a process,
// make another one.
ALONE_TEST_CASE("what identifies a group") {
  Communicator::Configure(20, 4);
  const auto get = [](bool reversed, uint64_t incarnation_of_1) {
    std::vector<Communicator*> found(2);
    OnRanks(*new World(2), [&](Rank& rank) {
      rank.number = reversed ? 1 - rank.rank : rank.rank;
      if (rank.number == 1) rank.restarted = incarnation_of_1;
      Communicator* const communicator = ValueOf(Get(rank));
      CHECK(communicator->rank() == rank.rank);
      found[rank.number] = communicator;
      Sum(*communicator, 10);
    });
    return found;
  };
  const auto first = get(false, 0);
  CHECK(get(false, 0) == first);
  const auto reversed = get(true, 0);
  CHECK(reversed[0] != first[0] && reversed[1] != first[1] && get(true, 0) == reversed);
  const auto restarted = get(false, 77);
  CHECK(restarted[0] != first[0] && restarted[1] != first[1] && restarted[0] != reversed[0]);
  CHECK(get(false, 77) == restarted && get(false, 78)[0] != restarted[0] && get(false, 0) == first);
}

// Each call site of a GPU makes first contact, and larger groups need more memory for it.
ALONE_TEST_CASE("the memory of first contact of a smaller group, and of a copy that failed, is freed") {
  const auto meet = [](int n) {
    OnRanks(*new World(n), [&](Rank& rank) {
      rank.number = rank.rank;
      FirstContact contact(**NcclLibrary::Open(""), reinterpret_cast<ncclComm_t>(&rank), rank.number, 5);
      CHECK(ValueOf(contact.Members()).size() == static_cast<size_t>(n));
      FreeRetired(rank.number);
    });
  };
  for (const int n : {2, 4, 3, 8}) meet(n);
  CHECK(num_allocated == 8 * 3);  // a block on each GPU, one on the host, and a stream
  for (const std::string call :
       {"cudaMemcpyAsync", "cudaStreamQuery", "cudaHostAlloc", "cudaMalloc", "cudaStreamCreate"}) {
    fault = {call, 0};
    const bool copies = call == "cudaMemcpyAsync" || call == "cudaStreamQuery";
    CHECK(!(copies ? CopyToGpu("x", 1, 5).status() : Exchange::Make(1).status()).ok());
    FreeRetired(current_device);
    CHECK(num_allocated == 8 * 3);
  }
  // That of a call too, with the memory of its own GPU.
  OnRanks(*new World(1), [](Rank& rank) {
    rank.number = 1;
    const CallSpec spec = SpecOf(Collective::kAllReduce, 1, "direct");
    auto call = ValueOf(DeviceCall::Make(spec, *ValueOf(Get(rank)), DType::kS32, 8, 8));
    FreeRetired(1);
    const int before = num_allocated;
    call.reset();
    FreeRetired(0);
    CHECK(num_allocated == before);
    std::vector<int32_t> x(Site::kCount), y(Site::kCount);
    Site next(*StateOf(spec), rank, 1);
    next.Begin(x.data(), y.data());
    CHECK(num_allocated == before);  // one program instead of the other
  });
}

// Rank 0 waits for an exchange that rank 1 never makes.
ALONE_TEST_CASE("an exchange that times out leaves XLA's communicator as it was") {
  Communicator::Configure(0.3, 4);
  std::atomic<int> turn{0};
  OnRanks(*new World(2), [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    const int before = rank.num_gathers;
    if (rank.rank == 0) {
      CHECK(Has(communicator.CheckSameOnAllRanks("a", 1), "did not come within 0.3 s"));
      for (int i = 0; i < 1000 && !*rank.made->revoked; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      CHECK(*rank.made->revoked);  // no kernel of NCCL waits on
      turn = 1;
    }
    while (turn < 1) std::this_thread::yield();
    CHECK(rank.num_gathers == before && !*rank.revoked);
    FirstContact contact(**NcclLibrary::Open(""), reinterpret_cast<ncclComm_t>(&rank), rank.device(), 5);
    const std::vector<Member> members = ValueOf(contact.Members());
    CHECK(members.size() == 2 && members[0].process == Incarnation() && members[1].device == members[0].device + 1);
  });
}

// NCCL connects the ranks of XLA's communicator in the thread that makes the first exchange.
ALONE_TEST_CASE("ranks that do not connect, and NCCL's calls that do not end, are errors in time") {
  Communicator::Configure(1, 4);
  std::atomic<bool> connects{false};
  auto *const apart = new World(2), *const unregistered = new World(2), *const alone = new World(2);
  auto* const missing = new World(2);
  apart->connects = &connects;
  unregistered->never_registers = 1;
  alone->never_joins = 1;
  const std::string late = "the other ranks of the group of 2 did not come ", in_time = "within 1 s";
  for (const auto& [world, expected] :
       {std::pair{apart, late + in_time + " (JAXCOMM_TIMEOUT_S)"},
        std::pair{missing, late + in_time + " (JAXCOMM_TIMEOUT_S)"},
        std::pair{unregistered, "ncclCommWindowRegister was not over " + in_time + " (JAXCOMM_TIMEOUT_S)"},
        std::pair{alone, late + "to make its communicator " + in_time}}) {
    OnRanks(*world, [&, world = world, expected = expected](Rank& rank) {
      if (world == missing && rank.rank == 1) return;
      const bool refused = world == alone && rank.rank == 1;
      CHECK(Has(Get(rank).status(), refused ? "ncclCommInitRankConfig: failed" : expected));
    });
  }
  connects = true;
  CHECK(num_symmetric == 2);  // NCCL may still use the memory that it has not registered
}

// The GPUs of a process meet before a rank returns the error.
ALONE_TEST_CASE("earlier work that has failed ends the waits of the other ranks") {
  Communicator::Configure(20, 4, "", false, 0, 1);
  GpuCallState* const state = StateOf(SpecOf(Collective::kAllReduce, 2, "direct"));
  OnRanks(*new World(2), [&](Rank& rank) {
    Site site(*state, rank, rank.rank);
    if (rank.rank == 1) fault = {"cudaStreamQuery"};
    std::vector<int32_t> x(Site::kCount), y(Site::kCount);
    site.Begin(x.data(), y.data());
    const std::string failed = "jaxcomm: all_reduce at here.py:1: cudaStreamQuery: failed";
    CHECK(Has(site.xla.Execute(), rank.rank == 1 ? failed : "process 0 failed: " + failed));
  });
}

// XLA's stream is busy for longer than any wait for peers.
ALONE_TEST_CASE("earlier work that never ends is an error in time") {
  Communicator::Configure(0.2, 4);
  GpuCallState* const state = StateOf(SpecOf(Collective::kAllReduce, 1, "direct"));
  OnRanks(*new World(1), [&](Rank& rank) {
    Site site(*state, rank, 0);
    site.stream.queue.push_back([] { return false; });
    std::vector<int32_t> x(Site::kCount), y(Site::kCount);
    site.Begin(x.data(), y.data());
    CHECK(Has(site.xla.Execute(),
              "all_reduce at here.py:1: the end of earlier work on this GPU did not come within 2 s"));
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
