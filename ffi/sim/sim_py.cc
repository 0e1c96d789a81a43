#include "sim/sim_py.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/algorithms.h"
#include "plan/channels.h"
#include "plan/plan_py.h"
#include "sim/simulate.h"
#include "sim/topology.h"

namespace jaxcomm {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

constexpr const char* kLevelKinds[] = {"switch", "rails", "fat_tree"};
constexpr const char* kFidelities[] = {"folded", "full"};

using Row = std::tuple<double, double, double>;  // overhead_s, bytes_per_s, latency_s

void BindClusters(nb::module_& m) {
  nb::class_<Level>(m, "Level", "One level of links of a cluster.")
      .def(
          "__init__",
          [](Level* self, const std::string& name, const std::string& kind, int64_t ranks) {
            new (self) Level();
            self->name = name;
            self->kind = EnumOf<LevelKind>(kLevelKinds, "kind", kind);
            self->ranks = ranks;
          },
          "name"_a, "kind"_a, "ranks"_a)
      .def_rw("bytes_per_s", &Level::bytes_per_s)
      .def_rw("flow_bytes_per_s", &Level::flow_bytes_per_s)
      .def_rw("overhead_s", &Level::overhead_s)
      .def_rw("latency_s", &Level::latency_s)
      .def_rw("taper", &Level::taper);
  nb::class_<LinkFault>(m, "LinkFault", "Links with less bandwidth.")
      .def(nb::init<int32_t, int64_t, bool, bool, double, double>(), "level"_a, "index"_a, "out"_a, "inward"_a,
           "capacity"_a, "latency_s"_a = 0.0);
  nb::class_<SlowRank>(m, "SlowRank", "A rank whose own steps take `slow` times as long.")
      .def(nb::init<int32_t, double>(), "rank"_a, "slow"_a);
  nb::class_<Cluster>(m, "Cluster", "Levels of links, innermost first, and the parameters of a rank.")
      .def(nb::init<>())
      .def_rw("levels", &Cluster::levels)
      .def_prop_rw(
          "own",
          [](const Cluster& cluster) {
            return Row{cluster.self.overhead_s, cluster.self.bytes_per_s, cluster.self.latency_s};
          },
          [](Cluster& cluster, const Row& row) {
            cluster.self = {std::get<0>(row), std::get<1>(row), std::get<2>(row)};
          },
          "(overhead_s, bytes_per_s, latency_s) of copies in a rank's own memory.")
      .def_rw("memory_bytes_per_s", &Cluster::memory_bytes_per_s)
      .def_rw("launch_s", &Cluster::launch_s)
      .def_rw("sync_overhead_s", &Cluster::sync_overhead_s)
      .def_rw("concurrent_bytes", &Cluster::concurrent_bytes)
      .def_rw("arena", &Cluster::arena)
      .def_rw("faults", &Cluster::faults)
      .def_rw("slow_ranks", &Cluster::slow_ranks);
  m.def("machine_of", &MachineOf, "cluster"_a, "num_ranks"_a, "The parameters of the cost model for a cluster.");
}

}  // namespace

void BindSim(nb::module_& m) {
  BindClusters(m);
  m.attr("CONCURRENT_BYTES") = kConcurrentBytes;  // of one channel on GPUs
  nb::class_<Bounds>(m, "Bounds", "Lower bounds of a time: without bytes, and of the bytes on the busiest link.")
      .def_ro("alpha_s", &Bounds::alpha_s)
      .def_ro("beta_s", &Bounds::beta_s)
      .def_ro("bottleneck", &Bounds::bottleneck);
  nb::class_<LinkLoad>(m, "LinkLoad")
      .def_ro("name", &LinkLoad::name)
      .def_ro("bytes", &LinkLoad::bytes)
      .def_ro("capacity", &LinkLoad::capacity);
  nb::class_<TimelineEntry>(m, "TimelineEntry")
      .def_ro("rank", &TimelineEntry::rank)
      .def_ro("ranks", &TimelineEntry::ranks)
      .def_ro("queued", &TimelineEntry::queued)
      .def_ro("name", &TimelineEntry::name)
      .def_ro("bytes", &TimelineEntry::bytes)
      .def_ro("start_s", &TimelineEntry::start_s)
      .def_ro("end_s", &TimelineEntry::end_s);
  nb::class_<Simulation>(m, "Simulation")
      .def_ro("time_s", &Simulation::time_s)
      .def_ro("bounds", &Simulation::bounds)
      .def_ro("wait_s", &Simulation::wait_s)
      .def_ro("ranks_simulated", &Simulation::ranks_simulated)
      .def_ro("num_ops", &Simulation::num_ops)
      .def_ro("links", &Simulation::links)
      .def_ro("timeline", &Simulation::timeline);
  m.def(
      "bounds",
      [](const Request& request, double item_bytes, const Cluster& cluster) {
        return Checked(BoundsOf(request, item_bytes, cluster));
      },
      "request"_a, "item_bytes"_a, "cluster"_a, "Lower bounds on every algorithm.");
  m.def(
      "simulate",
      [](const Request& request, const std::string& algorithm, double item_bytes, const Cluster& cluster,
         const std::string& fidelity, int64_t max_steps, int64_t max_entries) {
        const Algorithm* found = FindAlgorithm(request.collective, algorithm.c_str());
        if (found == nullptr) throw nb::value_error(("algorithm: got \"" + algorithm + "\"").c_str());
        const auto level = EnumOf<Fidelity>(kFidelities, "fidelity", fidelity);
        return Checked(Simulate(*found, request, item_bytes, cluster, level, max_steps, max_entries));
      },
      "request"_a, "algorithm"_a, "item_bytes"_a, "cluster"_a, "fidelity"_a = "folded",
      "max_steps"_a = int64_t{100'000'000}, "max_entries"_a = int64_t{0},
      "The time of a request of one channel; item_bytes counts all channels.");
}

}  // namespace jaxcomm
