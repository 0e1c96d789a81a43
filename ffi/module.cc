// The Python module jaxcomm._core: FFI handlers as capsules, the plan layer, settings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/completer.h"
#include "cpu/meeting.h"
#include "cpu/planner.h"
#include "handlers/call.h"
#include "plan/plan_py.h"

namespace nb = nanobind;

#define JAXCOMM_COLLECTIVE(enumerator, name, Handler)                 \
  extern "C" XLA_FFI_Error* Handler##Instantiate(XLA_FFI_CallFrame*); \
  extern "C" XLA_FFI_Error* Handler##Execute(XLA_FFI_CallFrame*);
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE

namespace jaxcomm {
namespace {

nb::capsule Capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

// {"jaxcomm_<name>": {"instantiate": ..., "execute": ...}} for jax.ffi.register_ffi_target.
nb::dict CpuTargets() {
  nb::dict targets;
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler)       \
  {                                                         \
    nb::dict stages;                                        \
    stages["instantiate"] = Capsule(&Handler##Instantiate); \
    stages["execute"] = Capsule(&Handler##Execute);         \
    targets["jaxcomm_" #name] = stages;                     \
  }
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
  return targets;
}

nb::dict CpuStateType() {
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(&CallState::id), "xla._CUSTOM_CALL_TARGET");
  type["type_info"] = nb::capsule(static_cast<void*>(&CallState::info), "xla._CUSTOM_CALL_TARGET");
  return type;
}

}  // namespace

NB_MODULE(_core, m) {
  m.def("cpu_targets", &CpuTargets, "FFI handlers of the CPU back end, by target name.");
  m.def("cpu_state_type", &CpuStateType, "The type of the handlers' state, for jax.ffi.register_ffi_type.");
  m.def(
      "start_completer", [](int64_t num_devices) { Completer::Get().EnsureThreads(num_devices); },
      nb::arg("num_devices"), "Starts at least one completion thread per local device.");
  m.def("set_timeout", &Meeting::SetTimeout, nb::arg("seconds"), "Bounds every wait for a late rank.");
  nb::module_ plan = m.def_submodule("plan", "Plans: build, validate, cost, select.");
  BindPlan(plan);
  plan.def("process_machine", &ProcessMachine, nb::arg("num_ranks"),
           "The devices of this process, as the cost model sees them.");
}

}  // namespace jaxcomm
