"""Mistakes in the model of CPU ranks of jaxcomm/simulate."""

from mutation.hand import Mutant

CPUS, WORK = "jaxcomm/simulate/cpus.py", "tests/simulate/test_cpus.py"
HERE_CODE, HERE = "jaxcomm/simulate/here.py", "tests/simulate/test_here.py"

MUTANTS = [
    Mutant("one thread does all small work", CPUS, "if not self.parallel:  #", "if False:  #", WORK),
    Mutant("the second thread is awake", CPUS, "total + (processors - 1) * _WAKE_S", "total", WORK),
    Mutant(
        "idle processors help",
        CPUS,
        "processors = min(cpus.processors, len(ranks))",
        "processors = cpus.processors",
        WORK,
    ),
    Mutant(
        "several threads run one rank",
        CPUS,
        "time = max(ranks.max(), min(total, most))",
        "time = min(total, most)",
        WORK,
    ),
    Mutant(
        "memory has no limit", CPUS, "return float(max(time, moved / cpus.memory_of_all))", "return float(time)", WORK
    ),
    Mutant(
        "the first in a cache leaves it last", CPUS, "found = cache.pop(key, 0) is None", "found = key in cache", WORK
    ),
    Mutant("caches hold data that another processor wrote", CPUS, "if other != processor:", "if False:", WORK),
    Mutant("results stay in the cache", CPUS, "self.stream = moved >= _STREAM_BYTES", "self.stream = False", WORK),
    Mutant("operands never pass through windows", CPUS, '"input" in read and small,', "False,", WORK),
    Mutant("all processes can read each other", CPUS, "not cpus.single_copy or ", "", WORK),
    Mutant("results never pass through windows", CPUS, '"output" in written or', "", WORK),
    Mutant("processes read each other as themselves", CPUS, 'foreign and place[1] != "scratch"', "False", WORK),
    Mutant("sums read whole operands", CPUS, "tile = _TILE_BYTES if", "tile = step.bytes if", WORK),
    Mutant("a part has many chunks", CPUS, "request.chunk_count * item_bytes or ", "", WORK),
    Mutant("the first call is counted", CPUS, "    call.run()\n    return", "    return", WORK),
    Mutant("rows of two machines mix", HERE_CODE, "        _check_machine(shape, members)\n", "", HERE),
]
