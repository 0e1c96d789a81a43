"""Mistakes in the readers of jaxcomm/simulate: HLO, profiles and execution traces. Mistakes in `validate-here`."""

from mutation.hand import Mutant

CHAKRA, GRAPHS, WORKLOADS = (f"jaxcomm/simulate/{name}.py" for name in ("chakra", "graphs", "workloads"))
TRACES, RUNS = "tests/simulate/test_chakra.py", "tests/simulate/test_traces.py"
PROFILE, PROFILES = "jaxcomm/simulate/profile.py", "tests/simulate/test_profile.py"
HLO, HLO_TEXT, WORK = (f"jaxcomm/simulate/{name}.py" for name in ("hlo", "hlo_text", "hlo_kernels"))
PROGRAMS, ORDER = "tests/simulate/test_hlo.py", "tests/simulate/test_hlo_order.py"
PYTHON_KERNELS = "jaxcomm/simulate/kernels.py"
HERE, PREDICTED_HERE = "jaxcomm/simulate/here.py", "tests/simulate/test_here.py"
CALLS, CLUSTER = "jaxcomm/simulate/calls.py", "jaxcomm/simulate/cluster.py"
STEPS, SCHEDULES = "jaxcomm/simulate/steps.py", "jaxcomm/simulate/goal.py"

MUTANTS = [
    Mutant("rare kernels multiply the time", PROFILE, "high if _RARE * low < high else low", "min(counts)", PROFILES),
    Mutant(
        "devices count together", PROFILE, "f\"{event.get('pid')} {arguments.get('device_ordinal')}\"", '""', PROFILES
    ),
    Mutant("programs of a name are mixed", PROFILE, "if len(programs) > 1:", "if False:", PROFILES),
    Mutant("files of larger runs stay", CHAKRA, "if stale := [", "if stale := [] and [", RUNS),
    Mutant("missing ranks end a trace", CHAKRA, "        if rank != found:", "        if False:", RUNS),
    Mutant("sizes of a plan are off", CHAKRA, '"comm_size": op.size}', '"comm_size": op.size + 1}', RUNS),
    Mutant("parts of a sum have another kind", CHAKRA, '"psum_scatter": 7', '"psum_scatter": 8', RUNS),
    Mutant("permutations share a tag", CHAKRA, "index - (node.kind == RECV)", "0", RUNS),
    Mutant("durations have another type", CHAKRA, '"duration_ns": _UINT64', '"duration_ns": _INT64', RUNS),
    Mutant("trips of a loop do not count", CHAKRA, "work.trips * _count(run.inside)", "_count(run.inside)", RUNS),
    Mutant("steps of traces are written", CHAKRA, "if not found.timeline.alike:", "if False:", RUNS),
    Mutant("blocks are gathered", WORKLOADS, '8: "psum_scatter"', '8: "all_gather"', RUNS),
    Mutant(
        "only two ranks are compared",
        GRAPHS,
        "for r, i in row]\n            if not",
        "for r, i in row[:2]]\n            if not",
        RUNS,
    ),
    Mutant(
        "flows have no limit",
        GRAPHS,
        "min(level.bytes_per_s, self.levels[depth].flow_bytes_per_s)",
        "level.bytes_per_s",
        RUNS,
    ),
    Mutant("latency of one level", GRAPHS, "self.levels[wire : depth + 1]", "self.levels[depth : depth + 1]", RUNS),
    Mutant("messages that overlap add up", GRAPHS, "spans = _union(", "spans = list(", RUNS),
    Mutant("cycles hide the other rank", GRAPHS, "needs = [senders[at]]", "needs = [at]", TRACES),
    Mutant(
        "traces name no network dimensions",
        CHAKRA,
        "tuple(mesh)[::-1]  # the inner",
        "tuple(mesh)  # the inner",
        TRACES,
    ),
    Mutant("streams of a loop's iterations overlap", CHAKRA, "control |= self.after.pop(stream, set())", "pass", RUNS),
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
        'ids.transpose([int(n) for n in order.split(",")]) if order else ids',
        "ids",
        PROGRAMS,
    ),
    Mutant(
        "inner axes come first in a group",
        HLO_TEXT,
        "ids.transpose(outside + inside)",
        "ids.transpose(outside + sorted(inside))",
        PROGRAMS,
    ),
    Mutant("texts have no order", HLO, "self.pairs and module.scheduled", "False", ORDER),
    Mutant("a start holds the stream", HLO, "if not start and not self.beside:", "if True:", ORDER),
    Mutant("a done waits for nothing", HLO, "self.stream |= earlier", "pass", ORDER),
    Mutant("control dependencies are dropped", HLO, "_all([*before, *after])", "_all(before)", ORDER),
    Mutant("the condition of a loop is free", HLO, "condition.then(body)", "body", ORDER),
    Mutant("a last condition is missing", HLO, "if condition.tasks else found", "if False else found", ORDER),
    Mutant("parts of tuples need all of it", HLO, "isinstance(inside, list) and index < len(inside)", "False", ORDER),
    Mutant(
        "combined permutations send one operand",
        HLO,
        " or in_place else",
        ' or base == "collective-permute" else',
        ORDER,
    ),
    Mutant("promoted reductions keep float32", HLO, "if self.kernels.promoted(i):", "if False:", ORDER),
    Mutant("packed types take bytes", HLO, "packed = shape.bits < 8", "packed = False", ORDER),
    Mutant("groups need global ids", HLO, 'if "channel_id" in i.attributes and', "if False and", ORDER),
    Mutant("scalars are kernels", WORK, "all(shape.size <= 1 for shape in arrays) or", "", ORDER),
    Mutant("conversions for the CPU are kernels", WORK, " or self._promotion(name, i)", "", ORDER),
    Mutant("products have the type of the CPU", WORK, "[self._before(name, operand) or self.", "[self.", ORDER),
    Mutant(
        "slices read their operand",
        WORK,
        "return written + _sum(operands[1:]), written",
        "return _sum(operands), written",
        ORDER,
    ),
    Mutant(
        "padding of convolutions counts",
        PYTHON_KERNELS,
        "lowest = np.maximum(-(start // step), 0)",
        "lowest = start * 0",
        PROGRAMS,
    ),
    Mutant("holes of convolutions count", PYTHON_KERNELS, "start % base == 0", "start == start", PROGRAMS),
    Mutant("devices of a mesh are in order", HLO_TEXT, "rows = order[rows]", "pass", PROGRAMS),
    Mutant("devices may repeat", HLO_TEXT, " or len(np.unique(rows)) < rows.size", "", PROGRAMS),
    Mutant("loops run once", HLO, 'return int(known["n"])', "return 1", PROGRAMS),
    Mutant(
        "a collective starts after all before it",
        HLO,
        "Task(work, tuple(sorted(needs)))",
        "Task(work, tuple(range(first)))",
        PROGRAMS,
    ),
    Mutant(
        "fusions read whole operands",
        WORK,
        "size = min(size, sum(use.shapes[0].bytes for use in uses))",
        "pass",
        PROGRAMS,
    ),
    Mutant(
        "parameters are in the order of the text",
        WORK,
        'key=lambda i: int(i.attributes["number"])',
        "key=lambda i: i.line",
        PROGRAMS,
    ),
    Mutant(
        "dimensions of a batch count twice",
        WORK,
        'own = {*dims(i, "rhs_contracting_dims"), *dims(i, "rhs_batch_dims")}',
        'own = {*dims(i, "rhs_contracting_dims")}',
        PROGRAMS,
    ),
    Mutant("profiles ignore the module", PROFILE, 'if arguments.get("hlo_module") != module:', "if False:", PROFILES),
    Mutant(
        "kernels of an instruction do not add up", PROFILE, "return sum(statistics", "return max(statistics", PROFILES
    ),
    Mutant("loops count in a median", PROFILE, "statistics.median(own) * len(own) / executions", "sum(own)", PROFILES),
    Mutant(
        "pairs of equal algorithms count", HERE, "if max(measured, 1 / measured) >= APART:", "if True:", PREDICTED_HERE
    ),
    Mutant(
        "all data lies in the cache",
        CLUSTER,
        "np.log([share for _, share in self.memories])",
        "0 * np.log([share for _, share in self.memories])",
        PREDICTED_HERE,
    ),
    Mutant(
        "copies have one bandwidth",
        CLUSTER,
        "copy=(overhead_s, rate * share)",
        "copy=(overhead_s, rate)",
        PREDICTED_HERE,
    ),
    Mutant(
        "a call touches the data of one rank",
        CALLS,
        "return ranks * (operand + result)",
        "return (operand + result) // n",
        PREDICTED_HERE,
    ),
    Mutant(
        "one group of a node calls at a time",
        STEPS,
        "node = self.whole.levels[0].ranks\n",
        "node = n\n",
        PREDICTED_HERE,
    ),
    Mutant(
        "schedules have one bandwidth of copies",
        SCHEDULES,
        "    cluster = cluster.holding(calls.touched_bytes(op, operand, n, min(cluster.levels[0].ranks, n)))\n",
        "    cluster = dataclasses.replace(cluster, memories=())\n",
        PREDICTED_HERE,
    ),
    Mutant(
        "processors are those of this machine",
        HERE,
        "cpus.Cpus(_devices(row), row.processors,",
        "cpus.Cpus(_devices(row), os.cpu_count() or 1,",
        PREDICTED_HERE,
    ),
    Mutant(
        "fitted rows are judged",
        HERE,
        "test = [one for one in judged if not one.fitted]\n    lines",
        "test = judged\n    lines",
        PREDICTED_HERE,
    ),
]
