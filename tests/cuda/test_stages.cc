// XLA's stages of a call: preparation, initialization and execution, and the devices on which they fail.
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/cuda/runtime/own_communicators.h"
#include "fakes/machine.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// Three runs of a call in XLA's stages. `bare`: a rank without collective memory, or -1.
void RunByXla(bool symmetric_buffers, int bare) {
  constexpr int kRanks = 3;
  constexpr int64_t kCount = 500;
  Communicator::Configure(20, 4);
  auto* world = new World(kRanks);
  auto* state = StateOf(SpecOf(Collective::kAllReduce, kRanks, "direct"), symmetric_buffers);  // of all devices
  OnRanks(*world, [&](Rank& rank) {
    rank.number = rank.rank;
    const XlaMemory memory(rank);
    Stream stream;
    FakeXla xla(*state, stream.handle(), rank.rank, &rank);
    memory.GiveTo(xla);
    if (rank.rank == bare) xla.memory_bytes = 0;
    for (int32_t run = 0; run < 3; ++run) {
      xla.run = run;
      int32_t* const x = memory.At(memory.InputOf(run));
      int32_t* const y = memory.At(memory.OutputOf(run));
      xla.Use(x, kCount, y, kCount);
      CHECK(xla.Prepare().empty());
      CHECK(xla.num_communicators == 1);
      CHECK(xla.regions.size() == (symmetric_buffers ? 2 : 0));
      if (symmetric_buffers) {
        CHECK(xla.regions[0].buffer == x && xla.regions[1].buffer == y && xla.regions[1].bytes == 4 * kCount);
      }
      if (run == 0) CHECK(Has(xla.Execute(), "XLA has not initialized the call on GPU"));
      CHECK(xla.Initialize().empty());
      for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<int32_t>(rank.rank + i + run), y[i] = -1;
      const size_t before = stream.queue.size();
      CHECK(xla.Execute().empty());
      // One kernel and the necessary copies. With windows, one more kernel before it.
      CHECK(stream.queue.size() - before == static_cast<size_t>(symmetric_buffers ? 2 : 1));
      while (!stream.Drain()) std::this_thread::yield();
      for (int64_t i = 0; i < kCount; ++i) CHECK(y[i] == kRanks * (kRanks - 1) / 2 + kRanks * (i + run));
    }
    device::Report& report = *state->calls.at(rank.rank)->communicator().comm().report;
    report.state = device::Report::kComplete;
    xla.run = 3;
    for (const std::string& failed : {xla.Initialize(), xla.Execute()}) {
      CHECK(Has(failed, "can't run, since a call before it failed"));
    }
  });
}

// A process reports once that buffers are copied, and why.
TEST_CASE("calls by XLA's stages") {
  CHECK(Alone([] { RunByXla(false, 1); }).empty());
  CHECK(Alone([] { RunByXla(true, -1); }).empty());
  const std::string said = "jaxcomm: all_reduce at here.py:1: JAXCOMM_SYMMETRIC_BUFFERS=1, but buffers are copied: ";
  CHECK(Alone([] { RunByXla(true, 1); }) == said + "XLA's window is null\n");
}

// Its peers would wait for its kernel.
ALONE_TEST_CASE("a rank that loses a window fails its process") {
  Communicator::Configure(20, 4);
  auto* state = StateOf(SpecOf(Collective::kAllReduce, 2, "direct"), true);
  OnRanks(*new World(2), [&](Rank& rank) {
    rank.number = rank.rank;
    const XlaMemory memory(rank);
    Stream stream;
    FakeXla xla(*state, stream.handle(), rank.rank, &rank);
    memory.GiveTo(xla);
    xla.Use(memory.At(memory.InputOf(0)), 4, memory.At(memory.OutputOf(0)), 4);
    for (xla.run = 0; xla.run < 2 - rank.rank; ++xla.run) {
      CHECK(xla.Prepare().empty());
      if (xla.run == 1) xla.memory_bytes /= 2;  // without the result
      CHECK(xla.Initialize().empty());
      if (rank.rank == 0) CHECK(Communicator::OwnFailure().ok() == (xla.run == 0));
    }
    if (rank.rank == 1) return;
    const std::string why = "the result was in a window of XLA's before, but is not now";
    CHECK(Has(xla.Execute(), why));
    CHECK(Has(Communicator::OwnFailure(), why.c_str()));
  });
}

// Prepare reports errors at once. Errors of one device in Initialize are deferred to Execute.
ALONE_TEST_CASE("errors of XLA are reported with their reason") {
  Communicator::Configure(20, 4);
  const auto said = [](const char* refused, bool provides = true, xla_abi::Extension extension = FakeXla().extension) {
    Stream stream;
    FakeXla xla(*StateOf(SpecOf(Collective::kAllReduce, 1)), stream.handle(), 0, nullptr);
    xla.refused = refused;
    xla.has_extension = provides;
    xla.extension = extension;
    int32_t x[4] = {}, y[4];
    xla.Use(x, 4, y, 4);
    const std::string prepared = xla.Prepare();
    if (!prepared.empty()) return prepared;
    CHECK(xla.Initialize().empty());
    return xla.Execute();
  };
  const std::string at = "jaxcomm: all_reduce at here.py:1: ";
  CHECK(said("extension") == at + "XLA does not say whether it provides communicators: not now");
  CHECK(said("request") == at + "XLA has no communicator for the group: not now");
  CHECK(said("get") == at + "XLA does not provide the group's communicator: not now");
  CHECK(said("") == at + "XLA's communicator is null");
  const std::string needs = ": jaxcomm needs jax, jaxlib and JAX's CUDA plugin 0.11.2 or later on GPUs";
  CHECK(said("", false) == at + "XLA provides no communicators to FFI handlers" + needs);
  xla_abi::Extension changed = FakeXla().extension;
  changed.struct_size = sizeof(xla_abi::Collectives);  // as jaxlib 0.11.2 has it
  CHECK(said("", true, changed) == at + "XLA's communicator is null");
  --changed.struct_size;
  CHECK(Has(said("", true, changed), "does not know"));
  changed = FakeXla().extension;
  changed.major_version = 1;
  CHECK(
      Has(said("", true, changed), "XLA's collectives extension is of version 1.2, which this jaxcomm does not know"));
  Stream stream;
  FakeXla barrier(*StateOf(SpecOf(Collective::kBarrier, 1)), stream.handle(), 0, nullptr);
  int32_t x[4], y[4];
  barrier.Use(x, 4, y, 4);
  CHECK(barrier.Initialize() == at.substr(0, 9) + "barrier at here.py:1: results must be aliased to operands");
  const std::vector<Array> args = {{x, {}}, {x, {4}}, {x, {4}}}, rets = {{x, {4}}, {y, {4}}};
  CHECK(Has(Invoke(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, barrier, {}, XLA_FFI_DataType_S32, args, rets),
            "results must be aliased to operands"));
  CHECK(num_errors == 0);
  XLA_FFI_Api old = {};
  old.struct_size = xla_abi::kFindExtensionOffset;  // as jaxlib 0.10.2 has it
  old.api_version.minor_version = 3;
  const std::vector<int64_t> ids = {0};
  const Status refused = XlaCollectives(&old, nullptr).Request(DeviceGroups(ids, 1));
  CHECK(refused.message() == "XLA's FFI 0.3 has no extensions" + needs);
}

// All later runs use the result of the first preparation, even if a new one would differ: no run plans again.
ALONE_TEST_CASE("the preparation happens once") {
  Communicator::Configure(20, 4);
  GpuCallState& state = *StateOf(SpecOf(Collective::kAllReduce, 2, "direct"), true);
  state.spec.groups = {0, 2, 1, 3};
  FakeXla xla(state, nullptr, 0, nullptr);
  int32_t x[4], y[4];
  for (int run = 0; run < 3; ++run) {
    xla.Use(x + run, 1, y + run, 1);
    CHECK(xla.Prepare().empty());
    CHECK(xla.num_groups == 2 && xla.groups[0].size == 2 && xla.groups[1].size == 2);
    CHECK(xla.groups[1].ids[0] == 1 && xla.groups[1].ids[1] == 3);
    CHECK(xla.regions.size() == 2 && xla.regions[0].bytes == 4 && xla.regions[1].bytes == 4);
    CHECK(xla.regions[0].buffer == x + run && xla.regions[1].buffer == y + run);
    xla.Use(x, 1, x, 1);  // in place
    CHECK(xla.Prepare().empty());
    CHECK(xla.regions.size() == 1 && xla.regions[0].buffer == x);
    state.spec.algorithm = "none of this name";
    state.spec.group_size = 1;
  }
  state.shared.input_bytes = 8;
  CHECK(xla.Prepare().empty() && xla.regions.size() == 2);  // other sizes are other windows
}

// A communicator on small GPUs has fewer channels, which are too few for LL messages of this size. A single GPU shares
// no buffers.
ALONE_TEST_CASE("windows are requested if any number of channels needs them") {
  Communicator::Configure(20, 4);
  for (const auto& [count, num_windows] :
       {std::pair<int64_t, size_t>{2048, 0}, {2049, 1}, {8192, 1}, {8193, 1}, {4, 0}}) {
    const CallSpec spec =
        count == 4 ? SpecOf(Collective::kAllReduce, 1, "direct") : SpecOf(Collective::kAllReduce, 2, "ll");
    FakeXla xla(*StateOf(spec, true), nullptr, 0, nullptr);
    std::vector<int32_t> x(count), y(count);
    xla.Use(x.data(), count, y.data(), count);
    CHECK(xla.Prepare().empty());
    CHECK(xla.regions.size() == num_windows);
  }
}

// Two devices of a process, each a group of its own. XLA ends a process in which only one of them fails to initialize.
ALONE_TEST_CASE("local devices fail together") {
  Communicator::Configure(20, 4);
  GpuCallState& state = *StateOf(SpecOf(Collective::kAllReduce, 1));
  state.spec.groups = {0, 1};
  struct Device {
    Device(int number, GpuCallState& state) : xla(state, stream.handle(), number, &rank) { xla.Use(x, 4, y, 4); }
    std::string Initialize(int64_t run) {
      own = &rank;
      xla.run = run;
      return xla.Initialize();
    }
    Rank rank = {new World(1), 0};
    Stream stream;
    int32_t x[4] = {}, y[4];
    FakeXla xla;
  };
  Device first(0, state), second(1, state);
  CHECK(first.Initialize(0).empty() && second.Initialize(0).empty());

  // An error of one device only.
  first.xla.state = StateOf(state.spec);
  static_cast<GpuCallState*>(first.xla.state)->spec.group_size = 2;
  for (int64_t run = 1; run < 3; ++run) {
    if (run == 2) first.xla.refused = "get";  // not asked: the first outcome is final, and no peer meets again
    CHECK(first.Initialize(run).empty());
    CHECK(Has(first.xla.Execute(), "the group's communicator has 1 ranks, the group 2"));
  }

  first.xla.state = &state;
  for (int64_t run = 20; run > 10; --run) CHECK(first.Initialize(run).empty());  // more than are remembered
  CHECK(first.Initialize(1).empty());
  state.calls.at(1)->communicator().comm().report->state = device::Report::kComplete;
  CHECK(second.Initialize(1).empty());  // as the other one
  for (Device* const device : {&first, &second}) CHECK(Has(device->Initialize(2), "a call before it failed"));
}

// Four GPUs of a process form two groups. An allocation waits for the kernels of all four, and nothing can be launched
// meanwhile. A kernel on GPU 2 waits for a launch on GPU 3, which comes late. `processes`: of the
// GPUs. `num_processes`: of the program.
void AllocateBesideAKernel(const std::vector<int32_t>& processes, int32_t num_processes = 2) {
  Communicator::Configure(20, 4, "", false, 5, num_processes);
  auto* const state = StateOf(SpecOf(Collective::kAllReduce, 2));
  state->spec.groups = {0, 1, 2, 3};
  state->spec.processes = processes;
  auto* const driver = new std::mutex;
  auto* const launched = new std::atomic<bool>(false);
  before_allocation = [driver, launched] {
    std::lock_guard<std::mutex> lock(*driver);
    const auto begin = std::chrono::steady_clock::now();
    while (!*launched) {
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(1)) {
        std::fprintf(stderr, "stalled\n");
        *launched = true;
      }
    }
  };
  std::vector<std::thread> groups;
  for (int group = 0; group < 2; ++group) {
    groups.emplace_back([=] {
      OnRanks(*new World(2), [=](Rank& rank) {
        const int device = rank.number = 2 * group + rank.rank;
        Stream stream;
        FakeXla xla(*state, stream.handle(), device, &rank);
        if (device == 2) stream.queue.push_back([=] { return launched->load(); });
        if (device == 3) {
          std::this_thread::sleep_for(std::chrono::milliseconds(200));
          std::lock_guard<std::mutex> lock(*driver);
          *launched = true;
        }
        int32_t x[4] = {1, 2, 3, 4}, y[4] = {};
        xla.Use(x, 4, y, 4);
        CHECK(xla.Initialize().empty() && xla.Execute().empty());
        fake::Wait(stream.handle());
        CHECK(y[3] == 8);
      });
    });
  }
  for (std::thread& group : groups) group.join();
}

TEST_CASE("GPUs of a process allocate when the earlier work of all of them has ended") {
  CHECK(Alone([] { AllocateBesideAKernel({5, 5, 5, 5}); }).empty());
  CHECK(Alone([] { AllocateBesideAKernel({}, 1); }).empty());  // a process that is alone has all GPUs
  // Of other processes, and where the processes are unknown: nothing to wait for.
  CHECK(Has(Alone([] { AllocateBesideAKernel({5, 5, 6, 6}); }), "stalled"));
  CHECK(Has(Alone([] { AllocateBesideAKernel({}); }), "stalled"));
  // More than the process has: the program was compiled for other devices.
  CHECK(Has(Alone([] {
              num_gpus = 2;
              AllocateBesideAKernel({5, 5, 5, 5});
            }),
            "stalled"));
}

ALONE_TEST_CASE("a GPU of the process that does not come is an error in time") {
  Communicator::Configure(0.02, 4);
  LocalRendezvous rendezvous;
  CHECK(rendezvous.Join(1, 1, 0.05).ok() && rendezvous.Join(1, 0, 0.05).ok());
  CHECK(Has(rendezvous.Join(2, 3, 0.05), "2 other GPUs of this process did not come within"));
  CHECK(!rendezvous.Join(3, 2, 0.05).ok());  // of another run
  CHECK(rendezvous.Join(3, 2, 0.05).ok());
}

// First runs find all ranks even if GPUs are busy for longer than the timeout.
ALONE_TEST_CASE("earlier work of a GPU does not count towards the timeout") {
  Communicator::Configure(0.5, 4, "", false, 0, 1);
  auto* world = new World(2);
  GpuCallState* const states[] = {StateOf(SpecOf(Collective::kAllReduce, 2)),
                                  StateOf(SpecOf(Collective::kAllReduce, 2))};
  OnRanks(*world, [&](Rank& rank) {
    Stream stream;
    rank.busy = &stream;
    for (GpuCallState* const state : states) {
      const auto begin = std::chrono::steady_clock::now();
      if (rank.rank == 0) {
        stream.queue.push_back([=] { return std::chrono::steady_clock::now() - begin > std::chrono::seconds(1); });
      }
      FakeXla xla(*state, stream.handle(), rank.rank, &rank);
      int32_t x[4] = {1, 2, 3, 4}, y[4] = {};
      xla.Use(x, 4, y, 4);
      CHECK(xla.Initialize().empty() && xla.Execute().empty());
      fake::Wait(stream.handle());
      CHECK(y[3] == 8);
    }
    rank.busy = nullptr;
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
