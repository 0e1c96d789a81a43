// Windows on the operands and results of a user's call, on fakes of XLA, CUDA and NCCL. XLA has the buffers at other
// addresses on each rank and in each run. Ranks are late.
#include "user_site.h"
// Must follow the fakes: see gpu_fake.h.
#include <jaxcomm/host.h>

namespace jaxcomm {
namespace {

using namespace fake;

// A target whose kernel exchanges blocks both ways: rank r gets block `own` of the second operand of each rank, and
// puts its own block into the first result of each rank.
constexpr int64_t kCount = 37;  // elements of a block

struct Swap {
  device::Comm comm;
  device::BufferWindow operand, result;
  const int32_t* x = nullptr;  // [ranks, kCount], this rank's part of `operand`
  int32_t* got = nullptr;      // [ranks, kCount]
};

void Run(const Swap& args) {
  if (device::IsAborted(args.comm)) return;
  const int32_t n = args.comm.local.size, rank = args.comm.local.rank;
  constexpr int64_t kBytes = kCount * int64_t{sizeof(int32_t)};
  for (int32_t i = 0; i < n; ++i) {
    const int32_t peer = (rank + i) % n;
    device::Get(args.got + peer * kCount, args.operand, peer, rank * kBytes, kBytes);
    device::Put(args.result, peer, rank * kBytes, args.x + peer * kCount, kBytes);
  }
  device::Barrier(args.comm, 0, 1);
}

thread_local bool checks = true;            // Initialize refuses calls without windows
thread_local const void* wanted = nullptr;  // another buffer whose window Execute asks for

ffi::Error InitializeSwap(host::Setup setup, ffi::RemainingArgs, ffi::RemainingRets) {
  return checks ? setup.CheckWindows() : ffi::Error::Success();
}

ffi::Error ExecuteSwap(cudaStream_t stream, host::Call call, ffi::AnyBuffer, ffi::AnyBuffer x,
                       ffi::Result<ffi::AnyBuffer> put, ffi::Result<ffi::AnyBuffer> got) {
  const auto operand = call.Window(wanted != nullptr ? wanted : x.untyped_data());
  if (!operand) return operand.error();
  const auto result = call.Window(put->untyped_data());
  if (!result) return result.error();
  Swap args = {call.comm(), *operand, *result};
  args.x = static_cast<const int32_t*>(x.untyped_data());
  args.got = static_cast<int32_t*>(got->untyped_data());
  return fake::Launch(1, 4, 0, stream, [args] { Run(args); }) == cudaSuccess ? ffi::Error::Success()
                                                                             : ffi::Error::Internal("not launched");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(TestInitialize, InitializeSwap,
                              ffi::Ffi::BindInitialize().Ctx<host::Setup>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TestExecute, ExecuteSwap,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<host::Call>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()    // x
                                  .Ret<ffi::AnyBuffer>()    // put
                                  .Ret<ffi::AnyBuffer>());  // got

Site SwapSite(int num_ranks) {
  Site site("swap");
  site.num_ranks = num_ranks;
  site.dtype = XLA_FFI_DataType_S32;
  site.initialize = &TestInitialize;
  site.execute = &TestExecute;
  site.operand_windows = {1};
  site.result_windows = {0};
  return site;
}

// The buffers of a rank's call. `x` and `put` are in XLA's collective memory.
struct Buffers {
  int32_t* x;
  int32_t* put;
  std::vector<int32_t> got;
  bool first_is_empty = false;  // the first operand, which then has the address of x
};

std::vector<Array> ArgsOf(const Site& site, const Buffers& buffers) {
  static int32_t unused = 0;
  return {buffers.first_is_empty ? Array{buffers.x, {0}} : Array{&unused, {1}}, {buffers.x, {site.num_ranks, kCount}}};
}
std::vector<Array> RetsOf(const Site& site, Buffers& buffers) {
  const std::vector<int64_t> dims = {site.num_ranks, kCount};
  buffers.got.resize(site.num_ranks * kCount);
  return {{buffers.put, dims}, {buffers.got.data(), dims}};
}

std::string Initialize(const Site& site, CallOnDevice& execution, Buffers& buffers) {
  return site.Begin(execution, ArgsOf(site, buffers), RetsOf(site, buffers));
}

std::string Execute(const Site& site, CallOnDevice& execution, Buffers& buffers) {
  return site.Execute(execution, ArgsOf(site, buffers), RetsOf(site, buffers));
}

CallOnDevice ExecutionOf(Rank& rank, const XlaMemory& memory) {
  CallOnDevice execution = fake::ExecutionOf(rank.rank, &rank);
  memory.GiveTo(execution);
  return execution;
}

// body(rank, memory, execution) on each rank of a world of its own.
template <typename Body>
void WithMemory(int num_ranks, const Body& body) {
  OnRanks(*new World(num_ranks), [&](Rank& rank) {
    rank.number = rank.rank;
    const XlaMemory memory(rank);
    CallOnDevice execution = ExecutionOf(rank, memory);
    body(rank, memory, execution);
  });
}

// Work of the stream that takes a while, on some ranks and in some runs.
void BeLate(cudaStream_t stream, int rank, int run) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds((rank * 7 + run * 5) % 3 * 4);
  Of(stream).queue.push_back([end] { return std::chrono::steady_clock::now() >= end; });
}

// Element i of what rank `from` has for rank i / kCount, or of what the latter has for it.
int32_t Element(int from, int64_t i, int run, bool to = false) {
  const auto other = static_cast<int>(i / kCount);
  return static_cast<int32_t>(1000000 * run + 10000 * (to ? other : from) + 1000 * (to ? from : other) + i % kCount);
}

void Fill(const Buffers& buffers, int n, int rank, int run) {
  for (int64_t i = 0; i < n * kCount; ++i) buffers.x[i] = Element(rank, i, run), buffers.put[i] = -1;
}

ALONE_TEST_CASE("operands and results that peers access where XLA has them") {
  for (const auto& [n, first_is_empty] : {std::pair{1, false}, {2, false}, {3, false}, {2, true}, {3, true}}) {
    cuda::Communicator::Configure(20, 4);
    Site site = SwapSite(n);
    // XLA may have an empty buffer at any address.
    if (first_is_empty) site.operand_windows = n == 2 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0};
    CHECK(site.Instantiate().empty());
    WithMemory(n, [&, n = n, first_is_empty = first_is_empty](Rank& rank, const XlaMemory& memory,
                                                              CallOnDevice& execution) {
      Stream& stream = Of(execution.stream);
      for (int run = 0; run < 6; ++run) {
        Buffers buffers = {memory.At(memory.InputOf(run / 2)), memory.At(memory.OutputOf(run / 2)), {}, first_is_empty};
        CHECK(Initialize(site, execution, buffers).empty());
        CHECK(execution.regions.size() == 2 && execution.regions[0].buffer == buffers.x);
        CHECK(execution.regions[1].buffer == buffers.put && execution.regions[1].bytes == 4 * kCount * size_t(n));
        // A CUDA graph is captured in the first run. XLA captures again only if an address is new.
        for (int replay = 0; replay < 2; ++replay) {
          BeLate(execution.stream, rank.rank, run);
          // Earlier work of the stream: peers must not access the buffers before it has ended.
          stream.Push([=] { Fill(buffers, n, rank.rank, 2 * run + replay); });
          const size_t before = stream.queue.size();
          CHECK(Execute(site, execution, buffers).empty());
          CHECK(stream.queue.size() == before + 2);  // the exchange and the kernel
          fake::Wait(execution.stream);
          for (int64_t i = 0; i < n * kCount; ++i) {
            const int32_t expected = Element(rank.rank, i, 2 * run + replay, true);
            CHECK(buffers.got[i] == expected && buffers.put[i] == expected);
            buffers.x[i] = buffers.put[i] = 0x77;  // other data of XLA's
          }
        }
      }
    });
  }
}

ALONE_TEST_CASE("a captured call finds the places of each run") {
  cuda::Communicator::Configure(20, 4);
  Site site = SwapSite(2);
  CHECK(site.Instantiate().empty());
  WithMemory(2, [&](Rank& rank, const XlaMemory& memory, CallOnDevice& execution) {
    Buffers buffers = {memory.At(memory.InputOf(0)), memory.At(memory.OutputOf(0)), {}};
    CHECK(Initialize(site, execution, buffers).empty());
    auto& captured = *Keep(std::make_unique<Stream>());
    captured.captures = true;
    const cudaStream_t stream = std::exchange(execution.stream, captured.handle());
    CHECK(Execute(site, execution, buffers).empty());
    execution.stream = stream;
    for (int run = 0; run < 3; ++run) {
      // Rank 1 alone has new addresses. Its own x is an argument of the kernel, so only the result moves.
      Buffers moved = buffers;
      if (rank.rank == 1) moved.put = memory.At(memory.OutputOf(run));
      CHECK(Initialize(site, execution, moved).empty());
      Fill(moved, 2, rank.rank, run);
      Replay(captured, stream);
      fake::Wait(stream);
      for (int64_t i = 0; i < 2 * kCount; ++i) CHECK(moved.put[i] == Element(rank.rank, i, run, true));
    }
  });
}

// The example reads x in place, and has no arena then.
ALONE_TEST_CASE("the example's kernel with a window") {
  for (const bool has_window : {true, false}) {
    cuda::Communicator::Configure(20, 3);
    Site site;
    site.num_ranks = 3;
    site.operand_windows = {0};
    CHECK(site.Instantiate().empty());
    WithMemory(3, [&](Rank& rank, const XlaMemory& memory, CallOnDevice& execution) {
      if (!has_window && rank.rank == 1) execution.memory_bytes = 0;
      for (int run = 0; run < 3; ++run) {
        Operands operands = OperandsOf(site, rank.rank, run);
        operands.x_at = reinterpret_cast<float*>(memory.At(memory.InputOf(run)));
        CHECK(jaxcomm::Initialize(site, execution, operands.x_at).empty());
        CHECK((On(site, rank.rank).comm.arena_bytes == 0) == has_window);
        BeLate(execution.stream, rank.rank, run);
        Of(execution.stream).Push([&] { std::copy(operands.x.begin(), operands.x.end(), operands.x_at); });
        CHECK(jaxcomm::Execute(site, execution, operands).empty());
        fake::Wait(execution.stream);
        CheckResults(site, operands, run);
        std::fill_n(operands.x_at, operands.x.size(), 77.0F);
      }
    });
  }
}

ALONE_TEST_CASE("calls without windows are refused with the reason") {
  const std::string where = "jaxcomm: swap at model.py:7: peers can't address the call's buffers: ";
  const std::string lists_none = "jaxcomm.ffi_call lists no operand_windows and no result_windows",
                    off = "JAXCOMM_SYMMETRIC_BUFFERS is not 1 in all processes",
                    older = "XLA has windows on its buffers from jaxlib 0.12 on", other = "another rank has none";
  struct Row {
    std::string of_rank[2];  // the error of its first Execute
    void (*prepare)(Rank&, CallOnDevice&) = [](Rank&, CallOnDevice&) {};
  };
  const Row table[] = {{{lists_none, lists_none}},
                       {{off, off}},
                       {{other, "operand 1: XLA's window is null"},
                        [](Rank& rank, CallOnDevice& execution) {
                          if (rank.rank == 1) execution.memory_bytes = 0;
                        }},
                       {{"result 0: XLA's window is null", other},
                        [](Rank& rank, CallOnDevice& execution) {
                          if (rank.rank == 0) execution.memory_bytes = XlaMemory::kBytes / 2;
                        }},
                       {{other, "XLA makes no windows on its buffers: not now"},
                        [](Rank& rank, CallOnDevice& execution) {
                          if (rank.rank == 1) execution.refused = "window";
                        }},
                       {{other, "operand 1: XLA has no window on its buffer: not now"},
                        [](Rank& rank, CallOnDevice& execution) {
                          if (rank.rank == 1) execution.refused = "get window";
                        }},
                       {{older, older}, [](Rank&, CallOnDevice& execution) { execution.extension.minor_version = 1; }},
                       {{older, older}, [](Rank&, CallOnDevice& execution) { --execution.extension.struct_size; }},
                       {{"operand 1: XLA's window is ", "operand 1: XLA's window is "},
                        [](Rank& rank, CallOnDevice&) { rank.world->spacing_error = 64; }}};
  cuda::Communicator::Configure(20, 4);
  for (const Row& row : table) {
    Site site = SwapSite(2);
    if (row.of_rank[0] == lists_none) site.operand_windows = site.result_windows = {};
    if (row.of_rank[0] == off) site.no_windows = off;
    CHECK(site.Instantiate().empty());
    WithMemory(2, [&](Rank& rank, const XlaMemory& memory, CallOnDevice& execution) {
      fake::Sum(*ValueOf(Get(rank)), 1);  // all ranks have arrived
      row.prepare(rank, execution);
      Buffers buffers = {memory.At(memory.InputOf(0)), memory.At(memory.OutputOf(0)), {}};
      CHECK(Initialize(site, execution, buffers).empty());
      const std::string found = Execute(site, execution, buffers);
      CHECK(Has(found, where + row.of_rank[rank.rank]));
      CHECK(rank.world->spacing_error == 0 || Has(found, "bytes apart from rank to rank"));
      CHECK(Of(execution.stream).queue.empty());  // no kernel
      rank.world->root.spacing_error = 0;
    });
  }
}

ALONE_TEST_CASE("a window is asked for where there is none") {
  cuda::Communicator::Configure(20, 4);
  Site none = SwapSite(2), site = SwapSite(2);
  none.operand_windows = none.result_windows = {};
  CHECK(none.Instantiate().empty() && site.Instantiate().empty());
  std::atomic<int> num_done{0};
  WithMemory(2, [&](Rank& rank, const XlaMemory& memory, CallOnDevice& execution) {
    Buffers buffers = {memory.At(memory.InputOf(0)), memory.At(memory.OutputOf(0)), {}};
    checks = false;
    CHECK(Initialize(none, execution, buffers).empty());
    CHECK(Has(Execute(none, execution, buffers), "lists no operand_windows and no result_windows"));
    CHECK(Of(execution.stream).queue.empty());
    CHECK(Initialize(site, execution, buffers).empty());
    wanted = buffers.got.data();
    CHECK(Has(Execute(site, execution, buffers), "does not list in operand_windows or result_windows"));
    wanted = nullptr;
    ++num_done;
    if (rank.rank == 1) return;
    while (num_done < 2) std::this_thread::yield();
    // A later run without windows: a captured graph can't do without, and the peer would wait for its kernel.
    execution.memory_bytes = 0;
    CHECK(Initialize(site, execution, buffers).empty());
    CHECK(Has(Execute(site, execution, buffers),
              "swap at model.py:7: the buffers had windows in earlier runs, but not now: operand 1: XLA's window"));
    CHECK(Has(cuda::Communicator::OwnFailure(), "but not now"));
  });
}

ALONE_TEST_CASE("empty buffers, and numbers that are wrong") {
  cuda::Communicator::Configure(20, 4);
  Site many = SwapSite(2);
  many.operand_windows.assign(9, 1);
  CHECK(Has(many.Instantiate(), "swap at model.py:7: a call can have 8 windows, got 10"));
  Site far = SwapSite(1);
  Site behind = SwapSite(1);
  far.operand_windows = {2};
  behind.result_windows = {2};
  CHECK(far.Instantiate().empty() && behind.Instantiate().empty());
  Site empty;
  empty.operand_windows = {0};
  empty.tokens = 0;
  CHECK(empty.Instantiate().empty());
  WithMemory(2, [&](Rank& rank, const XlaMemory& memory, CallOnDevice& execution) {
    Buffers buffers = {memory.At(0), memory.At(64), {}};
    CHECK(Has(Initialize(far, execution, buffers), "swap at model.py:7: the call has no operand 2 for a window"));
    CHECK(Has(Initialize(behind, execution, buffers), "swap at model.py:7: the call has no result 2 for a window"));
    CHECK(jaxcomm::Initialize(empty, execution).empty() && execution.regions.empty());
    CHECK(On(empty, rank.rank).comm.arena_bytes == 0);  // the empty window takes the place of the arena
    Operands operands = OperandsOf(empty, rank.rank, 0);
    CHECK(jaxcomm::Execute(empty, execution, operands).empty());
    fake::Wait(execution.stream);
  });
}

}  // namespace
}  // namespace jaxcomm
