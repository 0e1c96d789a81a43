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

// Of the next call of the handlers on this thread.
struct Options {
  bool uses_gin = true, reserves_first = false, needs_windows = false;
  int32_t nccl_version = NCCL_VERSION_CODE;
  int64_t arena_bytes = kArenaBytes;
};
thread_local Options options;
// Its results.
thread_local device::Comm comm;
thread_local device::GinHandle gin;
thread_local const ncclDevComm* nccl_comm = nullptr;

ffi::Error Initialize(host::Setup setup, ffi::RemainingArgs, ffi::RemainingRets) {
  if (options.needs_windows) return setup.CheckWindows();
  for (const bool reserves : {options.reserves_first, !options.reserves_first}) {
    if (!reserves && !options.uses_gin) continue;
    ffi::Error error = reserves ? setup.Reserve(options.arena_bytes) : setup.UseGin(options.nccl_version);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

ffi::Error Execute(host::Call call, ffi::RemainingArgs, ffi::RemainingRets) {
  comm = call.comm();
  gin = call.gin();
  nccl_comm = &call.nccl_comm();
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
  std::string Run(Rank& rank, const Options& of_call = {}) const {
    options = of_call;
    CallOnDevice execution = ExecutionOf(rank.device(), &rank);
    float x = 0;
    CHECK(Begin(execution, {{&x, {1}}}, {}).empty());
    return Execute(execution, {{&x, {1}}}, {});
  }
};

ALONE_TEST_CASE("a kernel of two nodes, whose targets ask for GIN before the arena or after it") {
  cuda::Communicator::Configure(20, 3);
  for (const bool reserves_first : {false, true}) {
    const Site site(4), larger(4);
    OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
      const int rank = of_xla.rank;
      Options options;
      options.reserves_first = reserves_first;
      const auto run = [&](const Site& on, int64_t bytes) {
        options.arena_bytes = bytes;
        CHECK(on.Run(of_xla, options).empty());
        cuda::Communicator& communicator = *ValueOf(Get(of_xla));
        CHECK(comm.world.rank == rank && comm.world.size == 4 && comm.local.size == 2 && comm.arena_bytes >= bytes);
        CHECK(device::RailOf(comm).World(1) == 2 + rank % 2);
        CHECK(nccl_comm == &communicator.gin()->nccl_comm());
        CHECK(gin.comm.world.rank == rank && gin.comm.local.rank == rank && gin.comm.local.size == 4);
        CHECK(gin.comm.timeout_ns == comm.timeout_ns && gin.comm.report == comm.report);
        CHECK(gin.comm.abort_flag == comm.abort_flag && gin.comm.call_id == comm.call_id);
        CHECK(gin.comm.signals.received != nullptr && gin.puts == gin.comm.signals.received + 4 * 4);
        CHECK(gin.arena != nullptr && gin.arena == communicator.Registered(comm.arena));
        return comm.arena.base;
      };
      const char* const first = run(site, kArenaBytes);
      CHECK(run(larger, 10 << 20) != first && run(site, kArenaBytes) == first);
    });
  }
}

ALONE_TEST_CASE("a kernel without an arena, and a kernel for several nodes on one, where nothing is for GIN") {
  cuda::Communicator::Configure(20, 3);
  for (const int num_nodes : {2, 1}) {
    const Site site(2);
    const auto network = num_nodes == 2 ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_NONE;
    OnRanks(NodesOf(num_nodes, 2 / num_nodes, network), [&](Rank& of_xla) {
      Options options;
      options.arena_bytes = 0;
      CHECK(site.Run(of_xla, options).empty());
      CHECK(gin.arena == nullptr && nccl_comm != nullptr && (gin.puts != nullptr) == (num_nodes == 2));
      CHECK(device::RailOf(comm).size == num_nodes);
    });
  }
}

ALONE_TEST_CASE("calls that are refused with the reason") {
  cuda::Communicator::Configure(20, 3);
  Options none, without, windows, old;
  without.uses_gin = false;
  none.uses_gin = false, none.arena_bytes = 0;
  windows.needs_windows = true;
  old.nccl_version = 22907;
  struct Refused {
    int num_nodes;
    ncclGinType_t network;
    Options of_rank_0, of_others;
    std::string text;
  };
  const std::string not_called =
      "the group's GPUs are of several nodes, and Initialize has not called jaxcomm::host::Setup::UseGin: call the "
      "target over groups of 2 ranks";
  const std::string headers = "the kernel was compiled with the headers of NCCL 2.29.7, expected those of " +
                              NcclVersionText(NCCL_VERSION_CODE);
  const std::string mixed = "the NCCL version of the kernel's headers must be the same on all ranks";
  const Refused table[] = {
      {2, NCCL_GIN_TYPE_PROXY, without, without, not_called},
      {2, NCCL_GIN_TYPE_PROXY, none, none, not_called},
      {2,
       NCCL_GIN_TYPE_NONE,
       {},
       {},
       "the group's GPUs are of several nodes of 2 ranks, and there is no GIN "
       "between them: NCCL offers no GIN on this network"},
      {2, NCCL_GIN_TYPE_PROXY, windows, windows,
       "peers can't address the call's buffers: the group's GPUs are of several nodes; peers of other nodes can't "
       "address XLA's buffers, and GIN can't use their windows"},
      {1, NCCL_GIN_TYPE_PROXY, old, old, headers},
      {2, NCCL_GIN_TYPE_PROXY, old, old, headers},
      {1, NCCL_GIN_TYPE_PROXY, old, {}, mixed},
      {2, NCCL_GIN_TYPE_PROXY, old, {}, mixed}};
  for (const Refused& row : table) {
    const Site site(4);
    OnRanks(NodesOf(row.num_nodes, 4 / row.num_nodes, row.network), [&](Rank& of_xla) {
      const std::string text = site.Run(of_xla, of_xla.rank == 0 ? row.of_rank_0 : row.of_others);
      CHECK(Has(text, "jaxcomm: exchange at model.py:7: " + row.text));
    });
  }
}

}  // namespace
}  // namespace jaxcomm
