// Python bindings of resolve.h and channels.h.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "plan/plan_py.h"
#include "plan/resolve.h"
#include "plan/select.h"

namespace jaxcomm {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

constexpr const char* kPlatforms[] = {"cpu", "cuda", "other"};
constexpr const char* kBackends[] = {"xla", "composition", "plan", "rows"};

// Fills in the fields of a CallSpec that a dictionary of attributes has.
struct FieldReader {
  const nb::dict& attributes;

  template <typename T>
  void operator()(const char* name, T& field) const {
    if (!attributes.contains(name)) return;
    const nb::object value = nb::borrow(attributes[name]);
    if constexpr (std::is_enum_v<T>) {
      field = static_cast<T>(nb::cast<int64_t>(nb::int_(value)));
    } else if constexpr (std::is_integral_v<T>) {
      field = static_cast<T>(nb::cast<int64_t>(nb::int_(value)));
    } else if constexpr (std::is_same_v<T, std::string>) {
      field = nb::cast<std::string>(value);
    } else {
      for (const nb::handle item : value) {
        field.push_back(nb::cast<typename T::value_type>(nb::int_(nb::borrow(item))));
      }
    }
  }
};

CallSpec SpecOf(const std::string& collective, const nb::dict& attributes) {
  CallSpec spec;
  spec.collective = CollectiveOf(collective);
  VisitCallAttributes(spec, FieldReader{attributes});
  VisitOtherAttributes(spec, FieldReader{attributes});
  return spec;
}

DType DTypeOf(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::kF8E8M0FNU); ++i) {
    if (name == Name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw nb::value_error(("elements of " + name + " are not supported").c_str());
}

// Raises NotImplementedError for what a platform lacks, and ValueError for arguments that do not fit.
Resolution Resolved(StatusOr<Resolution> resolution) {
  if (!resolution.ok() && resolution.status().code() == StatusCode::kUnavailable) {
    PyErr_SetString(PyExc_NotImplementedError, resolution.status().message().c_str());
    throw nb::python_error();
  }
  return Checked(std::move(resolution));
}

std::string ProtocolOf(const Resolution& resolution) {
  if (resolution.plan == nullptr) return "";
  const Protocol protocol = resolution.plan->protocol;
  return kProtocols[resolution.ll || protocol == Protocol::kMultimem ? static_cast<int>(protocol) : 0];
}

}  // namespace

void BindResolve(nb::module_& m) {
  nb::class_<Measured>(m, "Measured",
                       "Calls for which one plan was measured as faster on these GPUs: ffi/plan/resolve.h.")
      .def(
          "__init__",
          [](Measured* self, const std::string& collective, const std::string& dtype, int64_t num_ranks,
             int64_t ranks_per_node, int64_t min_bytes, int64_t max_bytes, const std::string& algorithm) {
            new (self) Measured{
                CollectiveOf(collective), DTypeOf(dtype), num_ranks, ranks_per_node, min_bytes, max_bytes, algorithm};
          },
          "collective"_a, "dtype"_a, "num_ranks"_a, "ranks_per_node"_a, "min_bytes"_a, "max_bytes"_a, "algorithm"_a);
  nb::class_<Capabilities>(m, "Capabilities", "Settings, versions and records of a platform: ffi/plan/resolve.h.")
      .def(
          "__init__",
          [](Capabilities* self, const std::string& platform, const std::string& setting,
             std::vector<Measured> measured, const std::vector<std::string>& passed, bool tested_between_nodes,
             bool measured_one_exchange, bool multimem, bool in_place, int32_t max_channels,
             std::optional<Machine> machine) {
            std::vector<Feature> features;
            for (const std::string& name : passed) features.push_back(EnumOf<Feature>(kFeatures, "passed", name));
            new (self) Capabilities{EnumOf<Platform>(kPlatforms, "platform", platform),
                                    setting,
                                    std::move(measured),
                                    std::move(features),
                                    tested_between_nodes,
                                    measured_one_exchange,
                                    multimem,
                                    in_place,
                                    max_channels,
                                    std::move(machine)};
          },
          "platform"_a, "setting"_a = "", "measured"_a = std::vector<Measured>(),
          "passed"_a = std::vector<std::string>(), "tested_between_nodes"_a = false, "measured_one_exchange"_a = false,
          "multimem"_a = false, "in_place"_a = false, "max_channels"_a = 1, "machine"_a = nb::none())
      .def_rw("machine", &Capabilities::machine);
  nb::class_<Placement>(m, "Placement", "Where the ranks of a group are: ffi/plan/resolve.h.")
      .def(
          "__init__",
          [](Placement* self, const std::string& scope, int64_t ranks_per_node, bool found, bool gin) {
            new (self) Placement{EnumOf<Scope>(kScopeNames, "scope", scope), ranks_per_node, found, gin};
          },
          "scope"_a = "process", "ranks_per_node"_a = 1, "found"_a = true, "gin"_a = false)
      .def_prop_ro("scope", [](const Placement& placement) { return kScopeNames[static_cast<int>(placement.scope)]; })
      .def_ro("ranks_per_node", &Placement::ranks_per_node);
  nb::class_<Resolution>(m, "Resolution", "What runs a call, and why: ffi/plan/resolve.h.")
      .def_prop_ro(
          "backend", [](const Resolution& resolution) { return kBackends[static_cast<int>(resolution.backend)]; },
          "\"xla\", \"composition\" (of XLA's collectives), \"plan\" or \"rows\" (kernels of GPUs over lists of rows).")
      .def_ro("algorithm", &Resolution::algorithm)
      .def_ro("reason", &Resolution::reason)
      .def_ro("lost", &Resolution::lost, "What XLA would do with its own collective, and does not do with this call.")
      .def_ro("returns_choices", &Resolution::returns_choices)
      .def_prop_ro("protocol", &ProtocolOf, "\"steps\", \"ll\", \"ll_two_shot\" or \"multimem\"; empty without a plan.")
      .def_prop_ro(
          "feature",
          [](const Resolution& resolution) {
            const bool on_gpus = resolution.backend == Backend::kPlan && resolution.num_channels > 0;
            return on_gpus ? kFeatures[static_cast<int>(FeatureOf(resolution))] : "";
          },
          "How the kernels of GPUs run the plan: one of FEATURES; empty if they do not.")
      .def_ro("ll", &Resolution::ll)
      .def_ro("request", &Resolution::request, "Of one channel.")
      .def_ro("call_request", &Resolution::call_request, "Of all channels, in whole blocks.")
      .def_ro("item_bytes", &Resolution::item_bytes)
      .def_ro("num_channels", &Resolution::num_channels, "Thread blocks; 0 on CPUs.")
      .def_ro("machine", &Resolution::machine)
      .def_ro("cost", &Resolution::cost, "Of one channel.")
      .def(
          "call_cost",
          [](const Resolution& resolution, std::optional<Machine> machine) {
            return CostOf(resolution, std::move(machine));
          },
          "machine"_a = nb::none(), "The cost with all channels, by default on the machine of the selection.");

  m.def("why_xla", &WhyXla, "algorithm"_a, "capabilities"_a,
        "Empty, or why XLA's own collectives run all calls with this argument `algorithm`.");
  m.def(
      "resolve",
      [](const std::string& collective, const nb::dict& attributes, const std::string& dtype, int64_t input_count,
         int64_t output_count, const Placement& placement, const Capabilities& capabilities, int64_t choices,
         int64_t list_bytes) {
        const Shapes shapes = {DTypeOf(dtype), input_count, output_count, choices, list_bytes};
        return Resolved(Resolve(SpecOf(collective, attributes), shapes, placement, capabilities));
      },
      "collective"_a, "attributes"_a, "dtype"_a, "input_count"_a, "output_count"_a, "placement"_a, "capabilities"_a,
      "choices"_a = 0, "list_bytes"_a = -1,
      "What runs a call with these attributes of its custom call. Raises ValueError or NotImplementedError.");
  m.def(
      "resolve_route_and_dispatch",
      [](int64_t num_ranks, int64_t tokens, int64_t choices, int64_t num_experts, int64_t row_bytes, bool named,
         int64_t max_sms, const Placement& placement, const Capabilities& capabilities) {
        const OneExchange sizes = {num_ranks, tokens, choices, num_experts, row_bytes};
        const RouteAndDispatch found = ResolveRouteAndDispatch(sizes, named, max_sms, placement, capabilities);
        return nb::make_tuple(found.one_exchange, found.reason);
      },
      "num_ranks"_a, "tokens"_a, "choices"_a, "num_experts"_a, "row_bytes"_a, "named"_a, "max_sms"_a, "placement"_a,
      "capabilities"_a, "Whether route_and_dispatch sends ids and rows in one exchange, and the reason.");
  m.def(
      "resolve_collective_matmul",
      [](const std::string& product, int64_t block_bytes, const Placement& placement,
         const Capabilities& capabilities) {
        constexpr const char* kProducts[] = {"rows", "sums", "scatter"};
        const auto of = EnumOf<MatmulProduct>(kProducts, "product", product);
        return ResolveCollectiveMatmul(of, block_bytes, placement, capabilities);
      },
      "product"_a, "block_bytes"_a, "placement"_a, "capabilities"_a,
      "\"unfused\" or \"ring\": the loop of a collective matmul.");
  nb::list features;
  for (const char* name : kFeatures) features.append(name);
  m.attr("FEATURES") = nb::tuple(features);
  m.attr("MAX_ONE_EXCHANGE_BYTES") = kMaxOneExchangeBytes;
  m.def(
      "select",
      [](const Request& request, const std::string& algorithm, int64_t item_bytes, const Machine& machine) {
        return Checked(Select(request, algorithm, item_bytes, machine));
      },
      "request"_a, "algorithm"_a, "item_bytes"_a, "machine"_a,
      "The algorithm of that name, or of lowest predicted cost if it is empty. Raises ValueError if none fits.");
  m.def("gpu_machine", &GpuMachine, "The machine model of a GPU.");
  m.def(
      "num_channels",
      [](const std::string& collective, const nb::dict& attributes, const std::string& dtype, int64_t input_count,
         int64_t output_count, int32_t max_channels) {
        const CallSpec spec = SpecOf(collective, attributes);
        const Geometry geometry = GpuGeometry(spec.group_size, spec.group_size, false);
        const Request request = Checked(MakeRequest(spec, geometry, input_count, output_count));
        const int64_t block_count = OfLists(spec.collective) ? input_count / spec.group_size : request.block_count;
        return NumChannels(block_count * ItemBytes(DTypeOf(dtype)), max_channels);
      },
      "collective"_a, "attributes"_a, "dtype"_a, "input_count"_a, "output_count"_a, "max_channels"_a,
      "The channels that the size of a block justifies.");
  nb::enum_<ReduceOp>(m, "ReduceOp", nb::is_arithmetic(), "Reduction of a collective.")
      .value("SUM", ReduceOp::kSum)
      .value("MAX", ReduceOp::kMax)
      .value("MIN", ReduceOp::kMin);
  m.attr("MOST_WINDOWS") = kMostBuffers;
  m.attr("ASYNCHRONOUS_CHANNELS") = kAsynchronousChannels;
}

}  // namespace jaxcomm
