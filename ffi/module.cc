// The Python module jaxcomm._core: FFI handlers as capsules, the plan layer, settings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <stdexcept>

#include "common/status.h"
#include "cpu/completion_pool.h"
#include "cpu/planner.h"
#include "cpu/process_context.h"
#include "cpu/rendezvous.h"
#include "handlers/call.h"
#include "plan/plan_py.h"
#include "recorder/recorder.h"
#include "sim/sim_py.h"
#include "transfer/transfer_py.h"
#include "transport/relay.h"
#include "transport/ucx_network.h"

namespace nb = nanobind;

#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, ...)            \
  extern "C" XLA_FFI_Error* Handler##Instantiate(XLA_FFI_CallFrame*); \
  extern "C" XLA_FFI_Error* Handler##Execute(XLA_FFI_CallFrame*);
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE

extern "C" XLA_FFI_Error* MoeCheckExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* MoeCountExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* MoePlaceExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* MoeSlicesExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* CacheInsertExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* CacheEmitExecute(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* DoneExecute(XLA_FFI_CallFrame*);

namespace jaxcomm {
namespace {

nb::capsule Capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// {"jaxcomm_<name>": {"instantiate": ..., "execute": ...}} for jax.ffi.register_ffi_target.
nb::dict CpuTargets() {
  nb::dict targets;
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, ...)  \
  {                                                         \
    nb::dict stages;                                        \
    stages["instantiate"] = Capsule(&Handler##Instantiate); \
    stages["execute"] = Capsule(&Handler##Execute);         \
    targets["jaxcomm_" #name] = stages;                     \
  }
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
  const std::pair<const char*, XLA_FFI_Error* (*)(XLA_FFI_CallFrame*)> local[] = {
      {"jaxcomm_moe_check", &MoeCheckExecute},
      {"jaxcomm_moe_count", &MoeCountExecute},
      {"jaxcomm_moe_place", &MoePlaceExecute},
      {"jaxcomm_moe_slices", &MoeSlicesExecute},
      {"jaxcomm_done", &DoneExecute},
      {"jaxcomm_cache_insert", &CacheInsertExecute},
      {"jaxcomm_cache_emit", &CacheEmitExecute},
  };
  for (const auto& [name, handler] : local) {
    nb::dict stages;
    stages["execute"] = Capsule(handler);
    targets[name] = stages;
  }
  return targets;
}

nb::dict CpuStateType() {
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(&CpuCallState::id), "xla._CUSTOM_CALL_TARGET");
  type["type_info"] = nb::capsule(static_cast<void*>(&CpuCallState::info), "xla._CUSTOM_CALL_TARGET");
  return type;
}

void RaiseIfError(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

void BindNetwork(nb::module_& m) {
  m.def("has_rdma", [] { return HasRdma(); }, "Whether this host has InfiniBand or RoCE devices.");
  m.def(
      "start_network",
      [](const std::string& library, const std::string& fallback_library, const std::string& devices,
         int32_t num_processes, uint64_t token) {
        UcxOptions options;
        options.library = library;
        options.fallback_library = fallback_library;
        options.devices = devices;
        RaiseIfError(ProcessContext::Get().StartNetwork(options, num_processes, token));
        const std::string address = ProcessContext::Get().active_messages().network()->address();
        return nb::bytes(address.data(), address.size());
      },
      nb::arg("library"), nb::arg("fallback_library"), nb::arg("devices"), nb::arg("num_processes"), nb::arg("token"),
      "Makes this process reachable from other nodes. Returns the address for connect_network.");
  m.def(
      "connect_network",
      [](int32_t index, nb::bytes address) {
        RaiseIfError(ProcessContext::Get().ConnectNetwork(index, std::string(address.c_str(), address.size())));
      },
      nb::arg("index"), nb::arg("address"), "Connects to a process of another node.");
}

void BindRecorder(nb::module_ m) {
  m.def(
      "start",
      [](const std::string& path, int64_t num_calls, int64_t process, int64_t num_processes, const std::string& version,
         const std::string& kernel, const std::string& node, const std::string& job) {
        RaiseIfError(Recorder::Get().Start(path, num_calls, {process, num_processes, version, kernel, node, job}));
      },
      nb::arg("path"), nb::arg("num_calls"), nb::arg("process"), nb::arg("num_processes"), nb::arg("version"),
      nb::arg("kernel"), nb::arg("node"), nb::arg("job"), "Records all calls of this process in a new file.");
  m.def("address", [] { return reinterpret_cast<uintptr_t>(&Recorder::Get()); }, "For jaxcomm._cuda.");
  m.def("path", [] { return Recorder::Get().path(); }, "The file of the recorder; empty if it is off.");
  m.def(
      "dump", [](const std::string& path) { RaiseIfError(Recorder::Get().Dump(path)); }, nb::arg("path"),
      "Copies the file of the recorder.");
  m.def(
      "set_ending", [](const std::string& ending) { Recorder::Get().SetEnding(ending); }, nb::arg("ending"),
      "Notes how this process ends: 'exit', or the name of an exception.");
  m.def(
      "pause", [](bool paused) { Recorder::Get().Pause(paused); }, nb::arg("paused"),
      "Stops or continues recording, for measurements of its cost.");
  m.def(
      "rejected",
      [] {
        const Network* network = ProcessContext::Get().active_messages().network();
        return network == nullptr ? uint64_t{0} : network->rejected();
      },
      "Number of messages from strangers that this process has refused.");
}

void BindCostParams(nb::module_& m) {
  m.def(
      "set_cost_params",
      [](const std::string& scope, const Machine& machine) {
        CostParams cost_params = CostParams::Current();
        cost_params.machines[static_cast<size_t>(EnumOf<Scope>(kScopeNames, "scope", scope))] = machine;
        CostParams::Set(cost_params);
      },
      nb::arg("scope"), nb::arg("machine"), "Sets the machine model of a scope for all programs made from now on.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.attr("xla_ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("cpu_targets", &CpuTargets, "FFI handlers of the CPU back end, by target name.");
  m.def("cpu_state_type", &CpuStateType, "The type of the handlers' state, for jax.ffi.register_ffi_type.");
  m.def(
      "start_completion_pool", [](int64_t num_devices) { CompletionPool::Get().EnsureThreads(num_devices); },
      nb::arg("num_devices"), "Starts at least one completion thread per local device.");
  m.def("end_program", &Rendezvous::EndProgram, "Marks the end of a program: all its call sites have been made.");
  m.def(
      "start_process",
      [](int32_t index, const std::string& node, bool single_copy) {
        ProcessContext& process = ProcessContext::Get();
        RaiseIfError(process.Start(index, node, single_copy));
        const ProcessInfo& info = process.info();
        nb::dict record;
        record["pid"] = info.address.pid;
        record["control_segment_fd"] = info.address.control_segment_fd;
        record["token"] = nb::make_tuple(info.address.token[0], info.address.token[1]);
        record["token_address"] = info.address.token_address;
        record["single_copy"] = info.single_copy;
        record["num_processors"] = info.num_processors;
        return record;
      },
      nb::arg("index"), nb::arg("node"), nb::arg("single_copy"),
      "Makes this process reachable for other processes of its host. Returns their arguments of connect_process.");
  m.def(
      "connect_process",
      [](int32_t index, const std::string& node, int32_t pid, int32_t control_segment_fd, std::array<uint64_t, 2> token,
         uint64_t token_address, bool single_copy, int64_t num_processors) {
        RaiseIfError(ProcessContext::Get().Connect(
            index, {node, {pid, control_segment_fd, token, token_address}, single_copy, num_processors}));
      },
      nb::arg("index"), nb::arg("node"), nb::arg("pid"), nb::arg("control_segment_fd"), nb::arg("token"),
      nb::arg("token_address"), nb::arg("single_copy"), nb::arg("num_processors"),
      "Registers another process, and connects to it if it is on the same node.");
  BindNetwork(m);
  m.def(
      "start_relay",
      [](const std::string& host, const std::string& port) {
        StatusOr<std::string> name = StartRelay(host, port);
        RaiseIfError(name.status());
        return *std::move(name);
      },
      nb::arg("host"), nb::arg("port"),
      "Starts a relay to a server. Returns the name of the abstract socket to connect to.");
  m.def("relay_has_lost_server", &RelayHasLostServer,
        "Whether the connection of start_relay() to its server was lost after it had been established.");
  m.def("close_relay_to_server", &CloseRelayToServer,
        "Closes the relay's connections to its server, which sees the end of the client's pending calls.");
  m.def(
      "set_wait_limits", [](double timeout_s, double warn_s) { Rendezvous::SetLimits({timeout_s, warn_s}); },
      nb::arg("timeout_s"), nb::arg("warn_s"),
      "Sets the limits of every wait for a late rank: a warning on standard error, then an error.");
  nb::module_ plan = m.def_submodule("plan", "Plans: build, validate, cost, select.");
  BindPlan(plan);
  BindResolve(plan);
  nb::module_ sim = m.def_submodule("sim", "Times of collectives on clusters.");
  BindSim(sim);
  BindCostParams(m);
  BindTransfer(m.def_submodule("transfer", "Endpoints between jobs."));
  BindRecorder(m.def_submodule("recorder", "The flight recorder of this process."));
  plan.def(
      "machine_of",
      [](const std::string& scope, int64_t num_ranks, int64_t ranks_per_node) {
        return MachineOf(CostParams::Current(), {EnumOf<Scope>(kScopeNames, "scope", scope), NumProcessors()},
                         num_ranks, ranks_per_node);
      },
      nb::arg("scope"), nb::arg("num_ranks"), nb::arg("ranks_per_node") = 1,
      "The machine model of a group. scope: process, node or network.");
}

}  // namespace jaxcomm
