"""Mistakes in ffi/sim and jaxcomm/simulate."""

from mutation.hand import Mutant

RATES, FOLD, REFINE = "ffi/sim/rates.cc", "ffi/sim/fold.cc", "ffi/sim/refine.cc"
TOPOLOGY, WORKLOAD, ENGINE = "ffi/sim/topology.cc", "ffi/sim/workload.cc", "ffi/sim/engine.cc"
BOUNDS, CALLS, CLUSTER = "ffi/sim/bounds.cc", "jaxcomm/simulate/calls.py", "jaxcomm/simulate/cluster.py"
TESTS = "test_sim"
COLLECTIVE, CLUSTERS = "tests/simulate/test_collective.py", "tests/simulate/test_clusters.py"

MUTANTS = [
    Mutant("links limit nothing", RATES, "if (link.visit == visit_ || !Tight(link)) continue;", "continue;", TESTS),
    Mutant(
        "transfers that stop leave their share of a link",
        RATES,
        "link.free -= uses[i].weight * level;",
        "",
        TESTS,
    ),
    Mutant(
        "others keep their rates when a transfer ends",
        RATES,
        "for (const auto& [user, use] : link.users) dirty_.push_back(user);",
        "",
        TESTS,
    ),
    Mutant(
        "a class of links carries the transfers of one rank",
        WORKLOAD,
        "sum += weight * multiplicity_ / static_cast<double>(count);",
        "sum += weight;",
        TESTS,
    ),
    Mutant(
        "every digit is a symmetry",
        FOLD,
        "if (alone.HashOf(plan_of(moved)) != hash) return false;",
        "",
        TESTS,
    ),
    Mutant(
        "colours ignore who sends to a rank",
        REFINE,
        "next[peer] += Mix(Mix(colour[rank] + 1) ^ edges[i].role);",
        "(void)peer;",
        TESTS,
    ),
    Mutant("uplinks have no taper", TOPOLOGY, "* adapter / level.taper;", "* adapter;", TESTS),
    Mutant(
        "half-way around a torus all bytes go one way",
        TOPOLOGY,
        "if (!both_ways && (hops < 0) != (way == 1)) continue;",
        "if ((hops < 0) != (way == 1)) continue;",
        TESTS,
    ),
    Mutant(
        "the network does not delay the entries of its queue",
        ENGINE,
        "state.queue_free_ps = std::max(state.queue_free_ps, entry.ready_ps) + op.overhead_ps;",
        "state.queue_free_ps = std::max(state.queue_free_ps, entry.ready_ps);",
        TESTS,
    ),
    Mutant(
        "an all_reduce needs each byte twice in each group",
        BOUNDS,
        "return 2 * (1 - group / ranks) * block;",
        "return 2 * group * block;",
        TESTS,
    ),
    Mutant(
        "a thread block has all planes",
        CLUSTER,
        "min(channels / adapters.hashed_planes, 1.0)",
        "1.0",
        COLLECTIVE,
    ),
    Mutant(
        "a key of a file that nobody reads is accepted",
        CLUSTER,
        "for key in sorted(extra):",
        "for key in []:",
        CLUSTERS,
    ),
    Mutant(
        "the bytes of one channel count",
        CALLS,
        "sim.simulate(choice.request, choice.algorithm, item_bytes * channels, native",
        "sim.simulate(choice.request, choice.algorithm, item_bytes, native",
        COLLECTIVE,
    ),
]
