// The calls of a user's target, stage by stage as XLA makes them.
#pragma once

#include "machine.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <string>
#include <vector>

#include "../../../ffi/cuda/xla/user_call.h"
#include "xla_fake.h"

// Defined by the user's library.
extern "C" const char* jaxcomm_use_host_api(const jaxcomm::host::Api* api);

namespace jaxcomm {
namespace fake {

// A call site of an executable: the target with its stages, and its attributes with those that jaxcomm.ffi_call adds.
struct UserSite {
  UserSite(std::string target, XLA_FFI_Handler* initialize, XLA_FFI_Handler* execute, int num_ranks)
      : target(std::move(target)), initialize(initialize), execute(execute), num_ranks(num_ranks) {}

  Attributes AttributesOf() const {
    Attributes all = own, call;
    call.AddScalar<int64_t>("group_size", XLA_FFI_DataType_S64, num_ranks);
    call.AddScalar<int64_t>("max_sms", XLA_FFI_DataType_S64, max_sms);
    call.AddText("site", site);
    call.AddText("target", target);
    all.AddDictionary("jaxcomm", call);
    std::vector<int64_t> groups;  // of consecutive devices
    for (int r = 0; r < num_groups * num_ranks; ++r) groups.push_back(r);
    all.AddArray("jaxcomm_groups", groups);
    if (!no_windows.empty()) all.AddText("jaxcomm_no_windows", no_windows);
    if (!operand_windows.empty()) all.AddArray("jaxcomm_operand_windows", operand_windows);
    if (!processes.empty()) all.AddArray("jaxcomm_processes", processes);
    if (!result_windows.empty()) all.AddArray("jaxcomm_result_windows", result_windows);
    return all;
  }

  // Once per executable.
  std::string Instantiate() {
    CallOnDevice execution;
    if (registered) CHECK(jaxcomm_use_host_api(&cuda::HostApi()) == nullptr);
    cuda::SetUserInitialize(target, initialize);
    const std::string problem =
        Invoke(&CudaUserInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE, execution, AttributesOf(), dtype, {}, {});
    state = execution.state;
    return problem;
  }

  using Arrays = std::vector<Array>;
  std::string Stage(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, CallOnDevice& execution, const Arrays& args,
                    const Arrays& rets) const {
    execution.state = state;
    return Invoke(handler, stage, execution, AttributesOf(), dtype, args, rets);
  }
  // The stages Prepare and Initialize of a run.
  std::string Begin(CallOnDevice& execution, const Arrays& args, const Arrays& rets) const {
    ++execution.run;
    const std::string problem = Stage(&CudaUserPrepare, XLA_FFI_ExecutionStage_PREPARE, execution, args, rets);
    if (!problem.empty()) return problem;
    return Stage(&CudaUserInitialize, XLA_FFI_ExecutionStage_INITIALIZE, execution, args, rets);
  }
  std::string Execute(CallOnDevice& execution, const Arrays& args, const Arrays& rets) const {
    return Stage(execute, XLA_FFI_ExecutionStage_EXECUTE, execution, args, rets);
  }

  std::string target, site = "model.py:7";
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
  int num_ranks, num_groups = 1;
  int64_t max_sms = 0;
  XLA_FFI_DataType dtype = XLA_FFI_DataType_F32;
  Attributes own;                  // of the user's
  std::vector<int32_t> processes;  // of the devices
  std::vector<int64_t> operand_windows, result_windows;
  std::string no_windows;
  bool registered = true;  // by jaxcomm.register_ffi_target, which passes jaxcomm's functions to the library
  void* state = nullptr;
};

inline CallOnDevice ExecutionOf(int device, void* nccl_comm) {
  CallOnDevice execution;
  execution.device = device;
  execution.nccl_comm = nccl_comm;
  execution.stream = NewStream();
  return execution;
}

// body(rank, execution) on each rank of a group of its own.
template <typename Body>
void OnDevices(int num_ranks, const Body& body) {
  OnRanks(num_ranks, [&](int rank, void* nccl_comm) {
    CallOnDevice execution = ExecutionOf(rank, nccl_comm);
    body(rank, execution);
  });
}

}  // namespace fake
}  // namespace jaxcomm
