#include "plan/plan_py.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/algorithms.h"
#include "plan/cost.h"
#include "plan/partition.h"
#include "plan/plan.h"
#include "plan/request.h"
#include "plan/select.h"
#include "plan/staging.h"
#include "plan/validate.h"

namespace jaxcomm {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

constexpr const char* kElements[] = {"array", "slices", "tokens", "boxes"};
constexpr const char* kBlocks[] = {"none", "one", "per_rank"};
constexpr const char* kLinks[] = {"self", "node", "network"};

}  // namespace

Collective CollectiveOf(const std::string& name) {
  std::string names;
  for (const CollectiveTraits& traits : Collectives()) {
    if (name == traits.name) return traits.collective;
    names += (names.empty() ? "" : ", ") + std::string(traits.name);
  }
  throw nb::value_error(("collective: got \"" + name + "\", expected one of " + names).c_str());
}

namespace {

const Algorithm& AlgorithmOf(const Request& request, const std::string& name) {
  const Algorithm* found = FindAlgorithm(request.collective, name.c_str());
  if (found != nullptr) return *found;
  std::string names;
  for (const Algorithm& algorithm : Algorithms(request.collective)) {
    names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
  }
  throw nb::value_error(
      (std::string(Name(request.collective)) + ": algorithm: got \"" + name + "\", expected one of " + names).c_str());
}

// The algorithm of that name. Raises ValueError if there is none or it does not support the request.
const Algorithm& SupportedAlgorithm(const Request& request, const std::string& name) {
  const Algorithm& algorithm = AlgorithmOf(request, name);
  if (algorithm.supports(request)) return algorithm;
  throw nb::value_error(
      (std::string(Name(request.collective)) + ": " + Select(request, name, 1, Machine()).status().message()).c_str());
}

std::string Show(const Place& place) {
  return std::to_string(place.rank) + "." + kSpaceNames[static_cast<int>(place.space)] + "[" +
         std::to_string(place.offset) + "]";
}

std::string Show(const Plan& plan, const Step& step) {
  const std::string kind = kStepNames[static_cast<int>(step.kind)];
  const std::string count = " x" + std::to_string(step.count);
  switch (step.kind) {
    case StepKind::kSignal:
    case StepKind::kWait:
      return kind + " " + std::to_string(step.peer);
    case StepKind::kZero:
      return kind + " " + Show(step.dst) + count;
    case StepKind::kReduce: {
      std::string sources;
      for (int32_t i = 0; i < step.num_sources; ++i) {
        sources += (i > 0 ? " + " : "") + Show(plan.sources.at(static_cast<size_t>(step.first_source + i)));
      }
      return kind + " " + Show(step.dst) + " = " + sources + count;
    }
    default:
      return kind + " " + Show(step.dst) + " = " + Show(step.src) + count;
  }
}

std::string Show(const Plan& plan) {
  std::string text = "rank " + std::to_string(plan.rank) + " of " + std::to_string(plan.num_ranks) + ", scratch " +
                     std::to_string(plan.scratch_count) + "\n";
  for (const Step& step : plan.steps) text += "  " + Show(plan, step) + "\n";
  return text;
}

Request RequestOf(const std::string& collective, const Geometry& geometry, int64_t block_count, int32_t root,
                  std::vector<int32_t> source_of) {
  Request request;
  request.collective = CollectiveOf(collective);
  request.geometry = geometry;
  request.block_count = block_count;
  request.root = root;
  request.source_of = std::move(source_of);
  return request;
}

std::vector<std::string> Words(const char* text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

void BindTraits(nb::module_& m) {
  nb::class_<CollectiveTraits>(m, "CollectiveTraits", "A row of the table of collectives.")
      .def_ro("name", &CollectiveTraits::name, "Native name.")
      .def_prop_ro(
          "functions", [](const CollectiveTraits& traits) { return Words(traits.functions); },
          "Names of the public functions; X_start is the asynchronous X.")
      .def_prop_ro(
          "elements", [](const CollectiveTraits& traits) { return kElements[static_cast<int>(traits.elements)]; },
          "What an element of a plan is: an element of the \"array\", or a list of \"slices\" or of \"tokens\".")
      .def_prop_ro(
          "input", [](const CollectiveTraits& traits) { return kBlocks[static_cast<int>(traits.input)]; },
          "The number of blocks in the input of a rank: \"none\", \"one\" or \"per_rank\".")
      .def_prop_ro(
          "output", [](const CollectiveTraits& traits) { return kBlocks[static_cast<int>(traits.output)]; },
          "The same for the output.")
      .def(
          "expected",
          [](const CollectiveTraits& traits, int32_t rank, int32_t block, int32_t root, int32_t source) {
            const Expected found = traits.expected({rank, block, root, source});
            return std::make_pair(found.rank, found.block);
          },
          nb::arg("rank"), nb::arg("block"), nb::arg("root"), nb::arg("source"),
          "The rank and the block of the input that become this block of the output. A collective that does not "
          "reduce.")
      .def(
          "blocks_into",
          [](const CollectiveTraits& traits, double num_ranks, double group_size) -> std::optional<double> {
            if (!traits.blocks_into) return std::nullopt;
            return traits.blocks_into(num_ranks, group_size);
          },
          nb::arg("num_ranks"), nb::arg("group_size"),
          "The blocks that a group of ranks must at least receive from the others, or None.")
      .def_prop_ro("reduces", &CollectiveTraits::Reduces, "Whether the output is a sum, by reduce_op.")
      .def_prop_ro(
          "attributes", [](const CollectiveTraits& traits) { return Words(traits.attributes); },
          "Attributes of a call besides those that all collectives have.");
  m.def("collectives", &Collectives, "The rows of all collectives.");
}

void BindData(nb::module_& m) {
  nb::class_<Place>(m, "Place", "The first element of a range.")
      .def(nb::init<>())
      .def_rw("rank", &Place::rank)
      .def_prop_rw(
          "space", [](const Place& place) { return kSpaceNames[static_cast<int>(place.space)]; },
          [](Place& place, const std::string& name) { place.space = EnumOf<Space>(kSpaceNames, "space", name); })
      .def_rw("offset", &Place::offset);
  nb::class_<Step>(m, "Step")
      .def(nb::init<>())
      .def(nb::init<const Step&>())
      .def_prop_rw(
          "kind", [](const Step& step) { return kStepNames[static_cast<int>(step.kind)]; },
          [](Step& step, const std::string& name) { step.kind = EnumOf<StepKind>(kStepNames, "kind", name); })
      .def_rw("peer", &Step::peer)
      .def_rw("count", &Step::count)
      .def_rw("dst", &Step::dst)
      .def_rw("src", &Step::src)
      .def_rw("first_source", &Step::first_source)
      .def_rw("num_sources", &Step::num_sources);
  nb::class_<Plan>(m, "Plan",
                   "The steps of one rank. `steps` and `sources` are copied when read; assign them to change.")
      .def(nb::init<>())
      .def(nb::init<const Plan&>())
      .def_rw("rank", &Plan::rank)
      .def_rw("num_ranks", &Plan::num_ranks)
      .def_rw("scratch_count", &Plan::scratch_count)
      .def_prop_rw(
          "steps", [](const Plan& plan) { return plan.steps; },
          [](Plan& plan, std::vector<Step> steps) { plan.steps = std::move(steps); })
      .def_prop_rw(
          "sources", [](const Plan& plan) { return plan.sources; },
          [](Plan& plan, std::vector<Place> sources) { plan.sources = std::move(sources); })
      .def("__str__", [](const Plan& plan) { return Show(plan); });
  nb::class_<Request>(m, "Request", "The task of a plan: collective, geometry and sizes.")
      .def(
          "__init__",
          [](Request* self, const std::string& collective, int32_t num_nodes, int32_t ranks_per_node,
             int64_t block_count, int64_t chunk_count, int32_t root, std::vector<int32_t> source_of,
             bool all_addressable, bool pull, bool multimem) {
            const Geometry geometry = {num_nodes, ranks_per_node, all_addressable, pull, multimem};
            new (self) Request(RequestOf(collective, geometry, block_count, root, std::move(source_of)));
            self->chunk_count = chunk_count;
          },
          "collective"_a, "num_nodes"_a = 1, "ranks_per_node"_a = 1, "block_count"_a = 0, "chunk_count"_a = 0,
          "root"_a = 0, "source_of"_a = std::vector<int32_t>(), "all_addressable"_a = true, "pull"_a = false,
          "multimem"_a = false)
      .def_prop_ro("collective", [](const Request& request) { return Name(request.collective); })
      .def_prop_ro("num_nodes", [](const Request& request) { return request.geometry.num_nodes; })
      .def_prop_ro("ranks_per_node", [](const Request& request) { return request.geometry.ranks_per_node; })
      .def_prop_ro("num_ranks", [](const Request& request) { return request.geometry.num_ranks(); })
      .def_prop_ro("all_addressable", [](const Request& request) { return request.geometry.all_addressable; })
      .def_prop_ro("input_count", [](const Request& request) { return InputCount(request); })
      .def_prop_ro("output_count", [](const Request& request) { return OutputCount(request); })
      .def_rw("block_count", &Request::block_count)
      .def_rw("chunk_count", &Request::chunk_count)
      .def_rw("staged_count", &Request::staged_count)
      .def_rw("root", &Request::root)
      .def_rw("source_of", &Request::source_of);
  m.def(
      "cpu_request",
      [](const std::string& collective, const std::string& scope, int64_t num_ranks, int64_t ranks_per_node,
         int64_t block_count, int32_t root, std::vector<int32_t> source_of) {
        const Geometry geometry = CpuGeometry(EnumOf<Scope>(kScopeNames, "scope", scope), num_ranks, ranks_per_node);
        return RequestOf(collective, geometry, block_count, root, std::move(source_of));
      },
      "collective"_a, "scope"_a, "num_ranks"_a, "ranks_per_node"_a, "block_count"_a = 0, "root"_a = 0,
      "source_of"_a = std::vector<int32_t>(), "The request of a call on CPUs. scope: process, node or network.");
  m.def(
      "reshard_request",
      [](const std::string& scope, int64_t num_ranks, int64_t ranks_per_node, const std::vector<int64_t>& sources,
         const std::vector<int64_t>& destinations) {
        CallSpec spec;
        spec.collective = Collective::kReshard;
        spec.group_size = num_ranks;
        spec.sources = sources;
        spec.destinations = destinations;
        const Geometry geometry = CpuGeometry(EnumOf<Scope>(kScopeNames, "scope", scope), num_ranks, ranks_per_node);
        constexpr int64_t kAnySize = std::numeric_limits<int64_t>::max();
        return Checked(MakeRequest(spec, geometry, kAnySize, kAnySize));
      },
      "scope"_a, "num_ranks"_a, "ranks_per_node"_a, "sources"_a, "destinations"_a,
      "The request of a reshard on CPUs: for each rank and dimension, the begin and the end of its box.");
}

using LinkRow = std::tuple<std::string, double, double, double>;
using LlRow = std::tuple<double, double, double>;

std::array<LinkRow, kNumLinks> GetLinks(const Machine& machine) {
  std::array<LinkRow, kNumLinks> rows;
  for (size_t i = 0; i < kNumLinks; ++i) {
    const LinkModel& link = machine.links[i];
    rows[i] = {kLinks[i], link.overhead_s, link.bytes_per_s, link.latency_s};
  }
  return rows;
}

void SetLinks(Machine& machine, const std::array<LinkRow, kNumLinks>& rows) {
  for (const auto& [name, overhead_s, bytes_per_s, latency_s] : rows) {
    machine.links[static_cast<size_t>(EnumOf<Link>(kLinks, "link", name))] = {overhead_s, bytes_per_s, latency_s};
  }
}

std::optional<LlRow> GetLl(const std::optional<LinkModel>& link) {
  if (!link) return std::nullopt;
  return LlRow{link->overhead_s, link->bytes_per_s, link->latency_s};
}

LinkModel ToLink(const LlRow& row) {
  const auto& [overhead_s, bytes_per_s, latency_s] = row;
  return {overhead_s, bytes_per_s, latency_s};
}

void BindCost(nb::module_& m) {
  nb::class_<Machine>(m, "Machine", "The machine model of the cost model.")
      .def(
          "__init__",
          [](Machine* self, const std::array<LinkRow, kNumLinks>& links, double launch_s, double ranks_per_processor,
             bool shared_network) {
            new (self) Machine{{}, launch_s, ranks_per_processor, shared_network, 0, std::nullopt, std::nullopt};
            SetLinks(*self, links);
          },
          "links"_a, "launch_s"_a = 0.0, "ranks_per_processor"_a = 1.0, "shared_network"_a = false)
      .def_prop_rw("links", &GetLinks, &SetLinks,
                   "(name, overhead_s, bytes_per_s, latency_s) of self, node and network.")
      .def_rw("launch_s", &Machine::launch_s)
      .def_rw("ranks_per_processor", &Machine::ranks_per_processor)
      .def_rw("shared_network", &Machine::shared_network)
      .def_rw("sync_overhead_s", &Machine::sync_overhead_s)
      .def_rw("concurrent_bytes", &Machine::concurrent_bytes)
      .def_rw("most_message_bytes", &Machine::most_message_bytes)
      .def_rw("arena", &Machine::arena)
      .def_prop_rw(
          "ll", [](const Machine& machine) { return GetLl(machine.ll); },
          [](Machine& machine, const LlRow& row) { machine.ll = ToLink(row); },
          "(overhead_s, bytes_per_s, latency_s) of LL messages; None: the machine has none.")
      .def_prop_rw(
          "ll_two_shot", [](const Machine& machine) { return GetLl(machine.ll_two_shot); },
          [](Machine& machine, const LlRow& row) { machine.ll_two_shot = ToLink(row); },
          "The same for algorithms with two exchanges.");
  nb::class_<Traffic>(m, "Traffic")
      .def_ro("messages", &Traffic::messages)
      .def_ro("bytes", &Traffic::bytes)
      .def_ro("signals", &Traffic::signals);
  nb::class_<Cost>(m, "Cost")
      .def_prop_ro("self", [](const Cost& cost) { return cost.traffic[0]; })
      .def_prop_ro("node", [](const Cost& cost) { return cost.traffic[1]; })
      .def_prop_ro("network", [](const Cost& cost) { return cost.traffic[2]; })
      .def_ro("steps", &Cost::steps)
      .def_ro("scratch_bytes", &Cost::scratch_bytes)
      .def_ro("time_s", &Cost::time_s);
}

}  // namespace

void BindPlan(nb::module_& m) {
  BindTraits(m);
  BindData(m);
  BindCost(m);
  m.def(
      "algorithms",
      [](const std::string& collective) {
        std::vector<std::pair<std::string, std::string>> rows;
        for (const Algorithm& algorithm : Algorithms(CollectiveOf(collective))) {
          rows.emplace_back(algorithm.name, algorithm.source);
        }
        return rows;
      },
      "collective"_a, "(name, source) of every algorithm, in order of preference.");
  m.def(
      "protocol",
      [](const std::string& collective, const std::string& algorithm) {
        Request request;
        request.collective = CollectiveOf(collective);
        return kProtocols[static_cast<int>(AlgorithmOf(request, algorithm).protocol)];
      },
      "collective"_a, "algorithm"_a,
      "\"steps\", \"ll\", \"ll_two_shot\" or \"multimem\": how the algorithm is carried out where it can be.");
  m.def(
      "supports",
      [](const Request& request, const std::string& algorithm) {
        return AlgorithmOf(request, algorithm).supports(request);
      },
      "request"_a, "algorithm"_a);
  m.def(
      "build",
      [](const Request& request, const std::string& algorithm) {
        return BuildAll(SupportedAlgorithm(request, algorithm), request);
      },
      "request"_a, "algorithm"_a, "The plans of all ranks.");
  m.def(
      "validate",
      [](const std::vector<Plan>& plans, const Request& request) { return Validate(plans, request).message(); },
      "plans"_a, "request"_a, "Empty if the plans are correct, otherwise the first fault.");
  m.def(
      "check",
      [](const Request& request, const std::string& algorithm) {
        return Validate(BuildAll(SupportedAlgorithm(request, algorithm), request), request).message();
      },
      "request"_a, "algorithm"_a, "build and validate, without a copy of the plans.");
  m.def(
      "cost",
      [](const Request& request, const std::string& algorithm, int64_t item_bytes, const Machine& machine,
         int32_t rank) {
        const Algorithm& found = SupportedAlgorithm(request, algorithm);
        if (rank < 0) return CostOf(found, request, item_bytes, machine);
        if (rank >= request.geometry.num_ranks()) throw nb::value_error("rank: out of range");
        return CostOf(BuildPlan(found, request, rank), request.geometry, item_bytes, machine);
      },
      "request"_a, "algorithm"_a, "item_bytes"_a, "machine"_a, "rank"_a = -1,
      "Cost of one rank; by default, of the rank that takes longest.");
}

}  // namespace jaxcomm
