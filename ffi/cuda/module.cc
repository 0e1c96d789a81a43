// The Python module jaxcomm._cuda: FFI handlers, versions of the build, properties of the machine, NCCL. Its import
// needs no driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <stdexcept>

#include "common/collective.h"
#include "common/status.h"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/capabilities.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/gin.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/nccl/threads.h"
#include "cuda/runtime/liveness.h"
#include "cuda/runtime/watchdog.h"
#include "cuda/xla/call.h"
#include "cuda/xla/route_and_dispatch_call.h"
#include "cuda/xla/user_call.h"
#include "recorder/recorder.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

void Check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

void Check(const char* name, cudaError_t result) { Check(cuda::CheckCuda(name, result)); }

const NcclLibrary& OpenNccl(const std::string& wheel_path) {
  const StatusOr<const NcclLibrary*> library = NcclLibrary::Open(wheel_path);
  Check(library.status());
  return **library;
}

nb::capsule Capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// {"instantiate": ..., "prepare": ..., ...} for jax.ffi.register_ffi_target: the handlers of the first stages.
template <typename... Handlers>
nb::dict Stages(Handlers... handlers) {
  constexpr const char* kNames[] = {"instantiate", "prepare", "initialize", "execute"};
  nb::dict stages;
  int i = 0;
  ((stages[kNames[i++]] = Capsule(handlers)), ...);
  return stages;
}

// By name. "jaxcomm_<name>_eager" are the targets that XLA does not capture into CUDA graphs.
nb::dict CudaTargets() {
  nb::dict targets;
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, ...)                                                        \
  if (!TraitsOf(Collective::enumerator).OfBoxes()) { /* CPUs only */                                              \
    auto* const instantiate = &Cuda##Handler##Instantiate;                                                        \
    targets["jaxcomm_" #name] = Stages(instantiate, &CudaPrepare, &CudaInitialize, &CudaExecute);                 \
    targets["jaxcomm_" #name "_eager"] = Stages(instantiate, &CudaPrepare, &CudaInitialize, &CudaExecuteEagerly); \
  }
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
  nb::dict done;
  done["execute"] = Capsule(&CudaDone);
  targets["jaxcomm_done"] = done;
  targets["jaxcomm_moe_one_shot"] = Stages(&CudaRouteAndDispatchInstantiate, &CudaRouteAndDispatchPrepare,
                                           &CudaRouteAndDispatchInitialize, &CudaRouteAndDispatchExecute);
  return targets;
}

// For jax.ffi.register_ffi_type.
template <typename State>
nb::dict StateType() {
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(&State::id), "xla._CUSTOM_CALL_TARGET");
  type["type_info"] = nb::capsule(static_cast<void*>(&State::info), "xla._CUSTOM_CALL_TARGET");
  return type;
}

nb::dict Built() {
  nb::dict built;
  built["cuda"] = CUDART_VERSION;
  built["nccl"] = NCCL_VERSION_CODE;
  built["gin"] = cuda::Gin::Versions();
  built["architectures"] = JAXCOMM_CUDA_ARCHITECTURES;
  return built;
}

int DriverVersion() {
  int version = 0;
  Check("cudaDriverGetVersion", cudaDriverGetVersion(&version));
  return version;
}

int NumDevices() {
  int num_devices = 0;
  Check("cudaGetDeviceCount", cudaGetDeviceCount(&num_devices));
  return num_devices;
}

std::string CodeProblem(int device) {
  int current = 0;
  Check("cudaGetDevice", cudaGetDevice(&current));
  Check("cudaSetDevice", cudaSetDevice(device));
  int ptx_version = 0;
  const Status status = cuda::CheckCuda("kernels", cuda::FindPtxVersion(&ptx_version));
  Check("cudaSetDevice", cudaSetDevice(current));
  return status.message();
}

nb::dict Nccl(const std::string& wheel_path) {
  const NcclLibrary& library = OpenNccl(wheel_path);
  nb::dict found;
  found["path"] = library.path;
  found["version"] = library.version;
  return found;
}

nb::dict CommunicatorProperties(const std::string& wheel_path, const std::vector<int>& devices) {
  const NcclLibrary& library = OpenNccl(wheel_path);
  if (devices.empty()) throw std::invalid_argument("communicator_properties: devices is empty");
  const StatusOr<ncclCommProperties_t> queried = [&] {
    nb::gil_scoped_release release;
    return QueryCommunicator(library, devices);
  }();
  Check(queried.status());
  const ncclCommProperties_t& properties = *queried;
  nb::dict result;
  result["device_api"] = properties.deviceApiSupport;
  result["multimem"] = properties.multimemSupport;
  result["gin"] = static_cast<int>(properties.ginType);
  result["gin_usable"] = cuda::Gin::Problem(library, properties).ok();
  result["railed_gin"] = static_cast<int>(properties.railedGinType);
  result["num_lsa_teams"] = properties.nLsaTeams;
  return result;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA back end of jaxcomm";
  m.attr("xla_ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("cuda_targets", &CudaTargets, "FFI handlers of the CUDA back end, by target name.");
  m.def("cuda_state_type", &StateType<cuda::GpuCallState>, "The type of the handlers' state.");
  m.def("moe_one_shot_state_type", &StateType<cuda::RouteAndDispatchState>,
        "The type of the state of jaxcomm_moe_one_shot.");
  m.def(
      "user_stages", [] { return Stages(&CudaUserInstantiate, &CudaUserPrepare, &CudaUserInitialize); },
      "Handlers of all stages but Execute, for targets with handlers of a user.");
  m.def(
      "set_user_initialize",
      [](const std::string& target, uintptr_t handler) {
        cuda::SetUserInitialize(target, reinterpret_cast<XLA_FFI_Handler*>(handler));
      },
      nb::arg("target"), nb::arg("handler"), "Sets the address of the user's handler that the stage Initialize calls.");
  m.def("user_state_type", &StateType<cuda::UserCallState>, "The type of the state of such targets.");
  m.def(
      "host_api", [] { return reinterpret_cast<uintptr_t>(&cuda::HostApi()); },
      "Address of the table for jaxcomm_use_host_api in the user's library (jaxcomm/host.h).");
  m.def("configure", &cuda::Communicator::Configure, nb::arg("timeout_s"), nb::arg("max_channels"), nb::arg("node_id"),
        nb::arg("symmetric_buffers"), nb::arg("process"), nb::arg("num_processes"), nb::arg("bulk_copy"),
        "Sets the timeout, the SMs of one call, the names of the node and of the process, the number of processes, and "
        "whether kernels use bulk copies, for all communicators that are made from now on.");
  m.def(
      "use_recorder", [](uintptr_t recorder) { Recorder::Use(reinterpret_cast<Recorder*>(recorder)); },
      nb::arg("recorder"), "Sets the flight recorder, before the watchdog starts: that of jaxcomm._core.");
  m.def("built", &Built, "Versions of the CUDA runtime and of NCCL's headers, and the architectures with code.");
  m.def("driver_version", &DriverVersion, "Newest CUDA that the driver supports, such as 13000; 0 without a driver.");
  m.def("num_devices", &NumDevices, "GPUs of this process. Raises RuntimeError if there is none.");
  m.def("code_problem", &CodeProblem, nb::arg("device"),
        "Why this module's kernels can't run on a GPU; empty if they can. Initializes the GPU.");
  m.def("nccl", &Nccl, nb::arg("wheel_path"), "Opens NCCL: path and version. Raises RuntimeError if it can't be used.");
  m.def(
      "start_watchdog", [] { cuda::StartWatchdog([] { std::_Exit(1); }); },
      "Starts the thread that prints the report of a kernel that has aborted, and then ends the process.");
  m.def(
      "serve_liveness",
      [](const std::string& token) {
        const StatusOr<int> port = cuda::ServeLiveness(token);
        Check(port.status());
        return *port;
      },
      nb::arg("token"), "Starts the server by which processes learn of each other's end. Its port.");
  m.def("join_liveness", &cuda::JoinLiveness, nb::arg("host"), nb::arg("port"), nb::arg("token"), nb::arg("process"),
        "Connects this process to that server, on a thread.");
  m.def(
      "end_threads",
      [](bool orderly) {
        if (orderly) cuda::LeaveLiveness();
        return cuda::Threads::End();
      },
      nb::arg("orderly"), nb::call_guard<nb::gil_scoped_release>(),
      "Ends the threads of this module, at exit. Whether they have ended. `orderly`: the end of this process is no "
      "failure for other processes.");
  m.def("failures", &cuda::Communicator::Failures, "The errors of calls on GPUs that have aborted so far.");
  m.def("communicator_properties", &CommunicatorProperties, nb::arg("wheel_path"), nb::arg("devices"),
        "Properties of a communicator over these GPUs, one rank each. Takes seconds.");
}

}  // namespace jaxcomm
