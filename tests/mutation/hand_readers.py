"""Mistakes in the readers of jaxcomm/simulate: HLO and profiles."""

from mutation.hand import Mutant

PROFILE, PROFILES = "jaxcomm/simulate/step/profile.py", "tests/simulate/test_profile.py"
HLO, HLO_TEXT, WORK = (f"jaxcomm/simulate/step/{name}.py" for name in ("hlo", "hlo_text", "hlo_kernels"))
PROGRAMS, ORDER = "tests/simulate/test_hlo.py", "tests/simulate/test_hlo_order.py"
PYTHON_KERNELS = "jaxcomm/simulate/step/roofline.py"

MUTANTS = [
    Mutant("rare kernels multiply the time", PROFILE, "high if _RARE * low < high else low", "min(counts)", PROFILES),
    Mutant(
        "devices count together", PROFILE, "f\"{event.get('pid')} {arguments.get('device_ordinal')}\"", '""', PROFILES
    ),
    Mutant("programs of a name are mixed", PROFILE, "if len(programs) > 1:", "if False:", PROFILES),
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
]
