// A user's handlers for groups of several nodes, on fakes of XLA, CUDA and NCCL: what the kernel receives for GIN, and
// the errors where it can't have it. test_gin_kernels.cc runs such kernels.
#include "fakes/user_call.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <jaxcomm/host.h>
#include <nccl.h>

#include <string>

namespace jaxcomm {
namespace {

using namespace fake;

constexpr int64_t kArenaBytes = 1000;

// The next call of the handlers on this thread, and its results.
thread_local bool uses_gin = true;
thread_local bool reserves_first = false;
thread_local bool needs_windows = false;
thread_local int32_t nccl_version = NCCL_VERSION_CODE;
thread_local int64_t arena_bytes = kArenaBytes;
thread_local device::Comm comm;
thread_local device::GinHandle gin;
thread_local const ncclDevComm* nccl_comm = nullptr;

ffi::Error Initialize(host::Setup setup, ffi::RemainingArgs, ffi::RemainingRets) {
  if (needs_windows) return setup.CheckWindows();
  if (reserves_first) {
    if (ffi::Error error = setup.Reserve(arena_bytes); error.failure()) return error;
    return setup.UseGin(nccl_version);
  }
  if (uses_gin) {
    if (ffi::Error error = setup.UseGin(nccl_version); error.failure()) return error;
  }
  return setup.Reserve(arena_bytes);
}

ffi::Error Execute(host::Call call, ffi::RemainingArgs, ffi::RemainingRets) {
  comm = call.comm();
  gin = call.gin();
  nccl_comm = uses_gin ? &call.nccl_comm() : nullptr;
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(TestInitialize, Initialize,
                              ffi::Ffi::BindInitialize().Ctx<host::Setup>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TestExecute, Execute, ffi::Ffi::Bind().Ctx<host::Call>().RemainingArgs().RemainingRets());

// A call site of an executable.
struct Site : UserSite {
  explicit Site(int num_ranks) : UserSite("exchange", &TestInitialize, &TestExecute, num_ranks) {
    operand_windows = {0};
    CHECK(Instantiate().empty());
  }
  // All stages of a run. Initialize reports its errors in Execute.
  std::string Run(Rank& rank) const {
    CallOnDevice execution = ExecutionOf(rank.device(), &rank);
    float x = 0;
    CHECK(Begin(execution, {{&x, {1}}}, {}).empty());
    return Execute(execution, {{&x, {1}}}, {});
  }
};

ALONE_TEST_CASE("a kernel of two nodes") {
  cuda::Communicator::Configure(20, 3);
  const Site site(4), larger(4);
  OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
    const int rank = of_xla.rank;
    const auto check = [&](int64_t bytes) {
      cuda::Communicator& communicator = *Ok(Get(of_xla));
      CHECK(comm.world.rank == rank && comm.world.size == 4 && comm.local.size == 2 && comm.arena_bytes >= bytes);
      CHECK(device::RailOf(comm).World(1) == 2 + rank % 2);
      CHECK(nccl_comm == &communicator.gin()->nccl_comm());
      CHECK(gin.comm.world.rank == rank && gin.comm.local.rank == rank && gin.comm.local.size == 4);
      CHECK(gin.comm.timeout_ns == comm.timeout_ns && gin.comm.report == comm.report);
      CHECK(gin.comm.abort_flag == comm.abort_flag && gin.comm.call_id == comm.call_id);
      CHECK(gin.comm.signals.received != nullptr && gin.puts == gin.comm.signals.received + 4 * 4);
      CHECK(gin.arena == communicator.Registered(comm.arena));
    };
    CHECK(site.Run(of_xla).empty());
    check(kArenaBytes);
    const char* const first = comm.arena.base;
    arena_bytes = 10 << 20;
    CHECK(larger.Run(of_xla).empty());
    check(arena_bytes);
    CHECK(comm.arena.base != first);
    arena_bytes = kArenaBytes;
    CHECK(site.Run(of_xla).empty());
    check(kArenaBytes);
    CHECK(comm.arena.base == first);
  });
}

ALONE_TEST_CASE("a kernel that asks for GIN after the arena") {
  cuda::Communicator::Configure(20, 3);
  const Site site(4);
  OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
    reserves_first = true;
    CHECK(site.Run(of_xla).empty());
    CHECK(nccl_comm != nullptr && comm.arena_bytes >= kArenaBytes && gin.puts != nullptr);
    CHECK(gin.arena != nullptr && gin.arena == Ok(Get(of_xla))->Registered(comm.arena));
  });
}

ALONE_TEST_CASE("a kernel without an arena") {
  cuda::Communicator::Configure(20, 3);
  const Site site(2);
  OnRanks(NodesOf(2, 1), [&](Rank& of_xla) {
    arena_bytes = 0;
    CHECK(site.Run(of_xla).empty());
    CHECK(gin.arena == nullptr && gin.puts != nullptr && nccl_comm != nullptr);
  });
}

// The same kernel runs on one node, where nothing is for GIN.
ALONE_TEST_CASE("a kernel for several nodes on one") {
  cuda::Communicator::Configure(20, 3);
  const Site site(2);
  OnRanks(NodesOf(1, 2, NCCL_GIN_TYPE_NONE), [&](Rank& of_xla) {
    CHECK(site.Run(of_xla).empty());
    CHECK(gin.puts == nullptr && nccl_comm != nullptr && device::RailOf(comm).size == 1);
  });
}

ALONE_TEST_CASE("a kernel that does not ask for GIN") {
  cuda::Communicator::Configure(20, 3);
  const Site site(4), small(4);
  OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
    uses_gin = false;
    CHECK(Has(site.Run(of_xla),
              "jaxcomm: exchange at model.py:7: the group's GPUs are of several nodes, and Initialize has not called "
              "jaxcomm::host::Setup::UseGin: call the target over groups of 2 ranks"));
    arena_bytes = 0;
    CHECK(Has(small.Run(of_xla), "Initialize has not called jaxcomm::host::Setup::UseGin"));
  });
}

ALONE_TEST_CASE("a group without GIN") {
  cuda::Communicator::Configure(20, 3);
  const Site site(4);
  OnRanks(NodesOf(2, 2, NCCL_GIN_TYPE_NONE), [&](Rank& of_xla) {
    CHECK(Has(site.Run(of_xla),
              "jaxcomm: exchange at model.py:7: the group's GPUs are of several nodes of 2 ranks, and there is no GIN "
              "between them: NCCL offers no GIN on this network"));
  });
}

ALONE_TEST_CASE("a kernel that needs windows on XLA's buffers") {
  cuda::Communicator::Configure(20, 3);
  const Site site(4);
  OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
    needs_windows = true;
    CHECK(
        Has(site.Run(of_xla),
            "jaxcomm: exchange at model.py:7: peers can't address the call's buffers: the group's GPUs are of several "
            "nodes; peers of other nodes can't address XLA's buffers, and GIN can't use their windows"));
  });
}

ALONE_TEST_CASE("headers of another NCCL") {
  cuda::Communicator::Configure(20, 3);
  const Site site(2), mixed(2);
  const std::string built = NcclVersionText(NCCL_VERSION_CODE);
  for (const int num_nodes : {1, 2}) {
    OnRanks(NodesOf(num_nodes, 2 / num_nodes), [&](Rank& of_xla) {
      const int rank = of_xla.rank;
      nccl_version = 22907;
      CHECK(Has(site.Run(of_xla),
                "jaxcomm: exchange at model.py:7: the kernel was compiled with the headers of NCCL 2.29.7, expected "
                "those of " +
                    built));
      nccl_version = rank == 0 ? 22907 : NCCL_VERSION_CODE;
      CHECK(Has(mixed.Run(of_xla), "the NCCL version of the kernel's headers must be the same on all ranks"));
    });
  }
}

}  // namespace
}  // namespace jaxcomm
