"""Mistakes in ffi/sim and jaxcomm/simulate."""

from mutation.hand import Mutant

RATES, FOLD, REFINE = "ffi/sim/rates.cc", "ffi/sim/fold.cc", "ffi/sim/refine.cc"
TOPOLOGY, WORKLOAD, ENGINE = "ffi/sim/topology.cc", "ffi/sim/workload.cc", "ffi/sim/engine.cc"
BOUNDS, SIMULATE = "ffi/sim/bounds.cc", "ffi/sim/simulate.cc"
CALLS, CLUSTER = "jaxcomm/simulate/calls.py", "jaxcomm/simulate/cluster.py"
PROGRAM, SCHEDULE = "jaxcomm/simulate/program.py", "jaxcomm/simulate/schedule.py"
TESTS = "test_sim"
SCHEDULES, GOAL = "jaxcomm/simulate/goal.py", "tests/simulate/test_goal.py"
STEP, PLAN = "tests/simulate/test_step.py", "tests/simulate/test_schedule.py"
FAULTS = "tests/simulate/test_faults.py"
COLLECTIVE, CLUSTERS = "tests/simulate/test_collective.py", "tests/simulate/test_clusters.py"

CHAKRA, GRAPHS, WORKLOADS = (f"jaxcomm/simulate/{name}.py" for name in ("chakra", "graphs", "workloads"))
TRACES = "tests/simulate/test_chakra.py"
MEGATRON, PUBLISHED = "jaxcomm/simulate/megatron.py", "tests/simulate/test_megatron.py"
PROFILE, PROFILES = "jaxcomm/simulate/profile.py", "tests/simulate/test_profile.py"
HLO, HLO_TEXT, PROGRAMS = "jaxcomm/simulate/hlo.py", "jaxcomm/simulate/hlo_text.py", "tests/simulate/test_hlo.py"

MUTANTS = [
    Mutant(
        "traces name no network dimensions",
        CHAKRA,
        "tuple(mesh)[::-1]  # the inner",
        "tuple(mesh)  # the inner",
        TRACES,
    ),
    Mutant(
        "streams of a loop's iterations overlap", CHAKRA, "control |= self.after.pop(stream, set())", "pass", TRACES
    ),
    Mutant("old feeders do not find the size", CHAKRA, '"comm_size": _INT64', '"comm_size": _UINT64', TRACES),
    Mutant("signed numbers are read as unsigned", CHAKRA, "return protobuf.signed(value)", "return value", TRACES),
    Mutant(
        "collectives do not wait for their stream",
        GRAPHS,
        'if self.streams and any((rank, "exchange") in self.busy for rank, _ in row):',
        "if False:",
        TRACES,
    ),
    Mutant("messages do not queue", GRAPHS, "max(now_s, self.free_s[src, wire]) if queue else now_s", "now_s", TRACES),
    Mutant(
        "nodes ignore control dependencies",
        WORKLOADS,
        "for need in (*node.control, *node.data)",
        "for need in node.data",
        TRACES,
    ),
    Mutant(
        "device groups ignore the permutation",
        HLO_TEXT,
        "ids = ids.transpose(",
        "ids = ids.reshape(base) if base else ids.transpose(",
        PROGRAMS,
    ),
    Mutant(
        "inner axes come first in a group",
        HLO_TEXT,
        "ids.transpose(outside + inside)",
        "ids.transpose(outside + sorted(inside))",
        PROGRAMS,
    ),
    Mutant("loops run once", HLO, 'return int(known["n"])', "return 1", PROGRAMS),
    Mutant(
        "a collective starts after all before it",
        HLO,
        "Task(work, tuple(sorted(earlier)))",
        "Task(work, tuple(range(first)))",
        PROGRAMS,
    ),
    Mutant(
        "fusions read whole operands",
        HLO,
        "size = min(size, sum(use.shapes[0].bytes for use in uses))",
        "pass",
        PROGRAMS,
    ),
    Mutant(
        "parameters are in the order of the text",
        HLO,
        'key=lambda i: int(i.attributes["number"])',
        "key=lambda i: i.line",
        PROGRAMS,
    ),
    Mutant(
        "dimensions of a batch count twice",
        HLO,
        'own = {*_dims(i, "rhs_contracting_dims"), *_dims(i, "rhs_batch_dims")}',
        'own = {*_dims(i, "rhs_contracting_dims")}',
        PROGRAMS,
    ),
    Mutant("profiles ignore the module", PROFILE, 'if arguments.get("hlo_module") != module:', "if False:", PROFILES),
    Mutant("kernels of an instruction do not add up", PROFILE, "1e-6 * sum(", "1e-6 * max(", PROFILES),
    Mutant("loops count in a median", PROFILE, "statistics.median(own) * len(own) / executions", "sum(own)", PROFILES),
    Mutant(
        "a layer has no gradient of weights", MEGATRON, "self.weights(self.rows, k, self.h, (last,))", "pass", PUBLISHED
    ),
    Mutant(
        "tiles fill their waves",
        MEGATRON,
        "math.ceil(tiles / _MULTIPROCESSORS) * _MULTIPROCESSORS / tiles",
        "1",
        PUBLISHED,
    ),
    Mutant(
        "interleaving does not shorten the bubble",
        MEGATRON,
        "(run.stages - 1) / run.interleaving *",
        "(run.stages - 1) *",
        PUBLISHED,
    ),
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
    Mutant("every short move takes its own overhead", WORKLOAD, "row_.overhead_s += more_s;", "", TESTS),
    Mutant(
        "a wait between nodes does not end a row of steps",
        WORKLOAD,
        "step.kind == StepKind::kWait ? geometry_.num_nodes > 1 : !is_short;",
        "step.kind == StepKind::kWait ? false : !is_short;",
        TESTS,
    ),
    Mutant(
        "a signal does not end a row of steps",
        WORKLOAD,
        "geometry_.num_nodes > 1 : !is_short;",
        "geometry_.num_nodes > 1 : moves_data && !is_short;",
        TESTS,
    ),
    Mutant("the links of short steps wait for each other", WORKLOAD, "(level + 1)", "(0 * level)", TESTS),
    Mutant("a wait lets a link start again", WORKLOAD, "busy_s - std::exchange(row_.run_s, busy_s)", "busy_s", TESTS),
    Mutant("short reductions run one by one", WORKLOAD, "if (is_short) {", "if (false) {", TESTS),
    Mutant("every signal takes its own overhead", WORKLOAD, "signals_s_ += overhead_s;", "", TESTS),
    Mutant(
        "signals after data share the overhead of those before it",
        WORKLOAD,
        "  signals_s_ = 0;\n  if (r",
        "  if (r",
        TESTS,
    ),
    Mutant("no copy into the arena", WORKLOAD, "AddCopy(plan.rank, copies_.before, &program);", "", TESTS),
    Mutant("no copy out of the arena", WORKLOAD, "AddCopy(plan.rank, copies_.after, &program);", "", TESTS),
    Mutant(
        "the engine runs the plan without a ring",
        SIMULATE,
        "= BuildPlan(algorithm, request, rank)",
        "= algorithm.build(request, rank)",
        TESTS,
    ),
    Mutant(
        "colours of a plan without a ring",
        REFINE,
        "= BuildPlan(algorithm, request, own)",
        "= algorithm.build(request, own)",
        TESTS,
    ),
    Mutant(
        "chunks of a folded ring do not divide",
        SIMULATE,
        "request.staged_count = CeilDiv(request.staged_count, n) * n;",
        "",
        TESTS,
    ),
    Mutant("a wait of a schedule requires no data", SCHEDULES, ", before[pair][waits[pair]])", ")", GOAL),
    Mutant("a rank answers before it is asked", SCHEDULES, "answer, (asked,)))", "answer))", GOAL),
    Mutant("a sum reads one operand", SCHEDULES, " * max(1, step.num_sources)", "", GOAL),
    Mutant("messages of a pair have one tag", SCHEDULES, "self.tags[src, dst] += 1", "self.tags[src, dst] = 1", GOAL),
    Mutant("a schedule has the bytes of one channel", SCHEDULES, "item_bytes * channels, ", "item_bytes, ", GOAL),
    Mutant("symmetric buffers pass through the arena", CALLS, "and not symmetric_buffers", "", COLLECTIVE),
    Mutant("the selection of the simulator has no arena", CALLS, "machine.arena = native.arena", "pass", COLLECTIVE),
    Mutant(
        "waits stay behind short moves",
        WORKLOAD,
        "geometry_.num_nodes > 1 || together_bytes == 0",
        "geometry_.num_nodes >= 1 || together_bytes == 0",
        TESTS,
    ),
    Mutant(
        "short moves of the simulator take an overhead each",
        CLUSTER,
        "result.together_bytes = channels * sim.TOGETHER_BYTES",
        "result.together_bytes = 0",
        STEP,
    ),
    Mutant(
        "the selection of the simulator takes long moves for short ones",
        CALLS,
        "machine.together_bytes //= channels",
        "pass",
        COLLECTIVE,
    ),
    Mutant("composites have no products", PROGRAM, '"run_state", "composite")', '"run_state")', STEP),
    Mutant("a grid of a pallas_call runs once", PROGRAM, "flops = math.prod(grid) * kernels", "flops = kernels", STEP),
    Mutant(
        "loops in a pallas_call run once",
        "jaxcomm/simulate/kernels.py",
        '{"scan": eqn.params.get("length", 1), ',
        "{",
        STEP,
    ),
    Mutant("a pallas_call may exchange data", PROGRAM, 'getattr(estimate, "remote_bytes_transferred", 0) or', "", STEP),
    Mutant("a lost adapter is no fault", "ffi/sim/topology.h", "!lost_.empty() ||", "", TESTS),
    Mutant("a fault slows both directions", TOPOLOGY, "if (fault.in) shares_[", "shares_[", TESTS),
    Mutant("a relay adds no latency", TOPOLOGY, "+ (first != src ? 1 : 0) + (last != dst ? 1 : 0)", "", TESTS),
    Mutant("a slow rank keeps its rates", WORKLOAD, "level.flow_bytes_per_s / slow", "level.flow_bytes_per_s", TESTS),
    Mutant("all ranks are on time", ENGINE, "ranks_[rank].clock_ps = workload_.programs[rank].start_ps;", "", TESTS),
    Mutant(
        "no barrier waits for a late rank", "ffi/sim/simulate.cc", "topology.StartsTogether() ? late_s : 0", "0", TESTS
    ),
    Mutant(
        "colours ignore faults", REFINE, "if (topology_->HasFaults()) colour[rank]", "if (false) colour[rank]", TESTS
    ),
    Mutant("a remainder of weights remains", RATES, "--link.rising == 0 ? 0 : ", "", FAULTS),
    Mutant("the rate of a hashed level is the mean", CLUSTER, "made.taper *= hashing", "hashing", FAULTS),
    Mutant("a lost plane has no hash", "jaxcomm/simulate/faults.py", "* left / level.planes", "", FAULTS),
    Mutant("an arrival has a band", CALLS, "time_s -= late_s", "pass", FAULTS),
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
        "jaxcomm/simulate/figures.py",
        "for key in sorted(extra):",
        "for key in []:",
        CLUSTERS,
    ),
    Mutant(
        "the bytes of one channel count",
        CALLS,
        "bytes_of_all = item_bytes * channels",
        "bytes_of_all = item_bytes",
        COLLECTIVE,
    ),
    Mutant(
        "a block of one element is rounded up to one per rank",
        "ffi/sim/simulate.cc",
        "if (Cuts(algorithm, request)) {",
        "if (algorithm.build != nullptr) {",
        TESTS,
    ),
    Mutant(
        "a target without rows is met",
        "jaxcomm/simulate/validate.py",
        "key[0].split()[0] in self.names and key not in judged]",
        "key in judged and key not in judged]",
        "tests/simulate/test_simulate_cli.py",
    ),
    Mutant(
        "kernels of one value are several",
        PROGRAM,
        "if i not in anchors and depth[i] == depth[index]:",
        "if i not in anchors and depth[i] == depth[index] < 0:",
        STEP,
    ),
    Mutant(
        "views are results",
        PROGRAM,
        "self.source.update({id(out): self.of(value) for out, value in pairs})",
        "self.source.update({id(out): out for out, value in pairs})",
        STEP,
    ),
    Mutant(
        "a loop runs once", SCHEDULE, "return inside, inside.time_s * work.trips", "return inside, inside.time_s", PLAN
    ),
    Mutant("loops keep their first count", PROGRAM, 'int(params["length"]), site)', "1, site)", STEP),
    Mutant(
        "what nothing uses is executed",
        PROGRAM,
        "if equation.keeps or any(id(v) in live for v in equation.outs):",
        "if True:",
        STEP,
    ),
    Mutant(
        "a synchronous collective does not wait for the other stream",
        SCHEDULE,
        'if not busy["exchange"]:\n                    start(heapq.heappop(compute), ("compute", "exchange"))',
        'if True:\n                    start(heapq.heappop(compute), ("compute", "exchange"))',
        PLAN,
    ),
    Mutant(
        "collectives start in the order of the program",
        SCHEDULE,
        "heapq.heappush(exchange, (now, index))",
        "heapq.heappush(exchange, (0.0, index))",
        PLAN,
    ),
    Mutant(
        "a product needs no second operand",
        "jaxcomm/simulate/kernels.py",
        "if i not in contract and i not in batch]",
        "if i not in contract]",
        STEP,
    ),
    Mutant(
        "a group has the links of all ranks",
        "jaxcomm/simulate/groups.py",
        "levels.append(dataclasses.replace(level, ranks=count))",
        "levels.append(level)",
        STEP,
    ),
    Mutant(
        "members keep their numbers in a permutation",
        "jaxcomm/simulate/steps.py",
        "tuple((int(place[s]), int(place[d])) for s, d in work.perm)",
        "work.perm",
        STEP,
    ),
    Mutant(
        "a what-if keeps the origin of the figure",
        CLUSTER,
        'origin[name] = "guess: what-if"',
        "pass",
        "tests/simulate/test_ask.py",
    ),
]
