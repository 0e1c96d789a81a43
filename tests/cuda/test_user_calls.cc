// A user's handlers on fakes of XLA, CUDA and NCCL. The test compiles the handlers of examples/fused_rmsnorm without
// change and calls them stage by stage as XLA does. Their kernel runs emulated.
#include "user_site.h"
// Must follow the fakes: see gpu_fake.h.
#include "../../ffi/cuda/xla/route_and_dispatch_call.h"

namespace jaxcomm {
namespace {

using namespace fake;

// Of jaxcomm's own calls.
cuda::Communicator& CommunicatorOf(const CallOnDevice& execution) {
  return *ValueOf(cuda::OwnCommunicator(static_cast<ncclComm_t>(execution.nccl_comm), execution.device));
}

ALONE_TEST_CASE("a user's kernel, stage by stage, between calls of jaxcomm's") {
  for (const int n : {1, 2, 3}) {
    cuda::Communicator::Configure(20, 3);
    Site small, large;
    small.num_ranks = large.num_ranks = n;
    large.tokens = 9;
    large.hidden = 70000;  // rows that exceed the target's first arena
    CHECK(small.Instantiate().empty() && large.Instantiate().empty());
    OnDevices(n, [&](int rank, CallOnDevice& execution) {
      CHECK(Initialize(small, execution).empty());
      const device::Comm first = On(small, rank).comm;
      CHECK(On(small, rank).max_channels == 3);
      // The target's arena, without change.
      for (int64_t i = 0; i < first.arena_bytes; ++i) CHECK(*first.arena.At(rank, i) == 0);
      CHECK(Initialize(large, execution).empty() && Initialize(small, execution).empty());
      CHECK(On(small, rank).comm.arena.base == first.arena.base);
      CHECK(On(large, rank).comm.arena.base != first.arena.base);
      DataCall<> sum(CommunicatorOf(execution), SpecOf(Collective::kAllReduce, n), 3000);
      // One after the other on one stream, as in XLA, without a wait in between.
      std::vector<std::pair<const Site*, Operands>> calls;
      for (const Site* site : {&small, &large, &small, &small, &large}) {
        calls.emplace_back(site, OperandsOf(*site, rank, static_cast<int>(calls.size())));
      }
      for (auto& [site, operands] : calls) {
        CHECK(Execute(*site, execution, operands).empty());
        sum.Launch(0, execution.stream);
      }
      fake::Wait(execution.stream);
      for (size_t i = 0; i < calls.size(); ++i) CheckResults(*calls[i].first, calls[i].second, static_cast<int>(i));
      CHECK(sum.IsRight(0));
    });
  }
}

ALONE_TEST_CASE("call sites and targets") {
  cuda::Communicator::Configure(20, 4);
  Site one, limited, other("other");
  one.max_sms = 9;  // more than there are
  limited.max_sms = 2;
  other.initialize = &FusedRmsnormInitializeBF16;
  other.execute = &FusedRmsnormExecuteBF16;
  other.dtype = XLA_FFI_DataType_BF16;
  for (Site* site : {&one, &limited, &other}) CHECK(site->Instantiate().empty());
  OnDevices(2, [&](int rank, CallOnDevice& execution) {
    // The GPU's earlier work has ended when ranks begin to wait for each other, in the first run only.
    char over = 0;
    cudaMemsetAsync(&over, 1, 1, execution.stream);
    for (const Site* site : {&one, &limited, &other}) CHECK(Initialize(*site, execution).empty());
    CHECK(over == 1);
    cudaMemsetAsync(&over, 2, 1, execution.stream);
    CHECK(Initialize(one, execution).empty() && over == 1);
    fake::Wait(execution.stream);
    CHECK(On(one, rank).comm.arena.base == On(limited, rank).comm.arena.base);
    CHECK(On(one, rank).comm.arena.base != On(other, rank).comm.arena.base);
    CHECK(On(one, rank).comm.call_id != On(limited, rank).comm.call_id);
    Operands operands = OperandsOf(limited, rank, 1);
    CHECK(Execute(limited, execution, operands).empty());
    CHECK(fused_rmsnorm::channels_of_last_launch == 2);
    fake::Wait(execution.stream);
    CheckResults(limited, operands, 1);
    operands = OperandsOf(one, rank, 2);
    CHECK(Execute(one, execution, operands).empty());
    CHECK(fused_rmsnorm::channels_of_last_launch == 4);
    fake::Wait(execution.stream);
    // 5 x 33 of bf16 are zeros.
    Operands zeros = OperandsOf(other, rank, 3);
    for (auto* array : {&zeros.x, &zeros.residual, &zeros.weight}) std::fill(array->begin(), array->end(), 0.0F);
    CHECK(Execute(other, execution, zeros).empty());
    fake::Wait(execution.stream);
    CHECK(zeros.out[0] == 0 && zeros.new_residual[0] == 0);
  });
}

// A dictionary of the user's.
void AddOptions(Site& site, int64_t depth) {
  Attributes options;
  options.AddScalar("depth", XLA_FFI_DataType_S64, depth);
  site.own.AddDictionary("options", options);
}

// Which calls of two ranks fit each other, and the error of both if not.
ALONE_TEST_CASE("calls of ranks that differ") {
  cuda::Communicator::Configure(20, 4);
  Site odd;
  odd.processes = {0};
  CHECK(Has(odd.Instantiate(), "the call has processes of 1 devices, expected those of the 2 devices of its groups"));
  odd.processes = {};
  odd.num_ranks = 0;
  CHECK(Has(odd.Instantiate(), "fused_rmsnorm_F32 at model.py:7: 0 devices cannot be split into groups of 0"));
  const char* const differ = "make this call with different shapes, types or arguments";
  const std::pair<const char*, void (*)(Site&, int)> table[] = {
      {differ, [](Site& site, int rank) { site.tokens = rank == 0 ? 1000 : 1, site.hidden = 3000; }},
      {differ, [](Site& site, int rank) { site.more_results = rank; }},
      {differ, [](Site& site, int rank) { site.dtype = rank == 0 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_S32; }},
      {differ, [](Site& site, int rank) { site.own.AddScalar("epsilon", XLA_FFI_DataType_F32, 1.0F + rank); }},
      {differ, [](Site& site, int rank) { site.operand_windows = {0, 1 + rank}; }},
      {differ, [](Site& site, int rank) { site.own.AddText("mode", rank == 0 ? "fast" : "slow"); }},
      {differ,
       [](Site& site, int rank) {
         site.own.AddScalar("zero", rank == 0 ? XLA_FFI_DataType_S32 : XLA_FFI_DataType_F32, 0);
       }},
      {differ, [](Site& site, int rank) { AddOptions(site, rank); }},
      {"rank 0 makes one at", [](Site& site, int rank) { site.target = rank == 0 ? "one" : "other"; }},
      {"makes fused_rmsnorm_F32 at a.py:2", [](Site& site, int rank) { site.site = rank == 0 ? "a.py:1" : "a.py:2"; }},
      {"max_sms must be the same on all ranks, but is", [](Site& site, int rank) { site.max_sms = 1 + rank; }},
      {nullptr, [](Site& site, int rank) {
         site.operand_windows = {0};
         site.own.AddText("mode", "fast");
         AddOptions(site, 1);
         site.no_windows = rank == 0 ? "a reason" : "another reason";
       }}};
  for (const auto& [text, change] : table) {
    Site sites[2];
    for (int rank : {0, 1}) {
      change(sites[rank], rank);
      CHECK(sites[rank].Instantiate().empty());
    }
    OnDevices(2, [&, text = text](int rank, CallOnDevice& execution) {
      CHECK(Initialize(sites[rank], execution).empty());
      Operands operands = OperandsOf(sites[rank], rank, 1);
      const std::string problem = Execute(sites[rank], execution, operands);
      fake::Wait(execution.stream);
      CHECK(text == nullptr ? problem.empty() : Has(problem, text));
    });
  }
}

// XLA reuses the memory of a started call after an error, since it does not run `done`.
ALONE_TEST_CASE("after an error of a user's call, work waits for the calls that have been started") {
  cuda::Communicator::Configure(20, 4);
  Site site;
  CHECK(site.Instantiate().empty());
  OnDevices(2, [&](int rank, CallOnDevice& execution) {
    CallSpec spec = SpecOf(Collective::kAllReduce, 2);
    spec.asynchronous = 1;
    DataCall<> started(*ValueOf(CommunicatorOf(execution).AsynchronousLane()), spec, 3000);
    const cudaStream_t side = fake::NewStream();
    started.Launch(0, side);
    Operands operands = OperandsOf(site, rank, 1);
    CHECK(Has(Execute(site, execution, operands), "has not asked for jaxcomm::host::Setup on GPU"));
    CHECK(fake::Of(execution.stream).num_waits == 1);
    fake::Wait(side);
    CHECK(started.IsRight(0));
  });
}

int num_initialized[2];

XLA_FFI_Error* InitializeOnDevice0(XLA_FFI_CallFrame* frame) {
  const int32_t device = Of(frame).device;
  ++num_initialized[device];
  if (device == 0) return nullptr;
  return reinterpret_cast<XLA_FFI_Error*>(new std::string("no kernel for this GPU"));
}

// XLA ends a process in which only one of several devices fails in Initialize.
ALONE_TEST_CASE("a kernel that has failed ends the calls after it, on all local devices") {
  cuda::Communicator::Configure(20, 4);
  Site site;
  CHECK(site.Instantiate().empty());
  CallOnDevice executions[2];
  fake::OnRanks(2, [&](int rank, void* nccl_comm) {
    executions[rank] = ExecutionOf(rank, nccl_comm);
    CHECK(Initialize(site, executions[rank]).empty());
  });
  CHECK(Initialize(site, executions[0]).empty());
  device::Report& report = *On(site, 1).comm.report;
  report.call_id = On(site, 1).comm.call_id;
  report.rank = 1, report.step = 17;
  report.state = device::Report::kComplete;
  CHECK(Initialize(site, executions[1]).empty());  // as on the other one
  const std::string failed = "can't run, since a call before it failed: fused_rmsnorm_F32 at model.py:7";
  Operands operands = OperandsOf(site, 1, 1);
  CHECK(Has(Execute(site, executions[1], operands),
            "fused_rmsnorm_F32 at model.py:7 " + failed + ": rank 1 aborted in step 17: rank 0"));
  Site other("other");
  other.initialize = &InitializeOnDevice0;
  CHECK(other.Instantiate().empty());
  for (CallOnDevice& execution : executions) {
    CHECK(Has(Initialize(site, execution), failed));
    CHECK(Has(Initialize(other, execution), failed));  // it has not run yet
  }
}

ALONE_TEST_CASE("an error of one device is reported by its Execute") {
  CallOnDevice executions[2];
  for (int rank = 0; rank < 2; ++rank) executions[rank] = ExecutionOf(rank, nullptr);
  Site other("other");
  other.initialize = &InitializeOnDevice0;
  CHECK(other.Instantiate().empty());
  for (int run = 1; run <= 2; ++run) {
    for (CallOnDevice& execution : executions) CHECK(Initialize(other, execution).empty());
    CHECK(num_initialized[0] == run && num_initialized[1] == 1);
    Operands operands = OperandsOf(other, 1, 1);
    CHECK(Has(Execute(other, executions[1], operands), "no kernel for this GPU"));
    CHECK(Has(Execute(other, executions[0], operands), "has not asked for jaxcomm::host::Setup on GPU 0"));
  }
}

// When the target is registered.
ALONE_TEST_CASE("XLA's queries about handlers") {
  XLA_FFI_Api_Version version = {};
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version = version;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  // Calls that XLA must not capture into CUDA graphs: asynchronous ones, and those between hosts.
  for (const auto& [handler, captured] : {std::pair{&CudaUserInitialize, false},
                                          {&CudaExecute, true},
                                          {&CudaExecuteEagerly, false},
                                          {&CudaRouteAndDispatchExecute, true}}) {
    metadata.traits = 0;
    CHECK(handler(&frame) == nullptr && metadata.api_version.minor_version == XLA_FFI_API_MINOR);
    CHECK((metadata.traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) == captured);
  }
}

ALONE_TEST_CASE("libraries of other versions") {
  host::Api api = cuda::HostApi();
  api.version += 100;  // another minor version
  CHECK(jaxcomm_use_host_api(&api) == std::string(JAXCOMM_VERSION_TEXT));
  api = cuda::HostApi();
  api.call_bytes += 8;
  CHECK(jaxcomm_use_host_api(&api) != nullptr);
  api = cuda::HostApi();
  api.struct_size -= 8;
  CHECK(jaxcomm_use_host_api(&api) != nullptr);
  Site site;
  site.registered = false;
  CHECK(site.Instantiate().empty());
  CallOnDevice execution;
  Operands operands = OperandsOf(site, 0, 1);
  CHECK(Initialize(site, execution).empty());
  CHECK(Has(Execute(site, execution, operands), "has not been registered by jaxcomm.register_ffi_target"));
  api = cuda::HostApi();
  api.struct_size += 8;  // functions that these headers do not declare
  api.version += 1;
  CHECK(jaxcomm_use_host_api(&api) == nullptr);
  CHECK(jaxcomm_use_host_api(&cuda::HostApi()) == nullptr);
}

}  // namespace
}  // namespace jaxcomm
