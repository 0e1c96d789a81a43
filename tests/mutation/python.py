"""Runs the tests of a module against mutants of its Python source, which the operators of cosmic-ray make."""

import ast
import concurrent.futures
import json
import pathlib
import queue
from typing import NamedTuple

from . import lines, operators, record, trees

# Without the test that needs the CUDA module.
LOWERING_FOR_CUDA = (
    "tests/cuda/test_cuda_lowering.py --deselect=tests/cuda/test_cuda_lowering.py::test_every_collective_is_tried"
)
OPS = ("tests/test_contract.py", "tests/test_errors.py", "tests/test_xla_algorithm.py")
BENCH = ("test_bench_report", "test_bench", "multiprocess/test_bench_processes")
# Tests of a module, one run of pytest each. Files that catch most come first. {0} is the module's name.
TESTS = {
    "jaxcomm/__init__.py": ["tests/test_contract.py"],
    "jaxcomm/_check.py": ["tests/test_errors.py", "tests/ops/test_psum.py", "tests/ops/test_all_gather.py"],
    "jaxcomm/_compat.py": ["tests/test_compat.py", "tests/test_xla_algorithm.py", "tests/ops/test_psum.py"],
    "jaxcomm/_config.py": ["tests/test_config.py", "tests/test_errors.py"],
    "jaxcomm/_installed.py": ["tests/test_installed.py"],
    "jaxcomm/_processes/interfaces.py": ["tests/test_interfaces.py"],
    "jaxcomm/_lowering.py": ["tests/test_lowering.py", LOWERING_FOR_CUDA, "tests/ops/test_psum.py"],
    "jaxcomm/_native.py": [
        "tests/test_headers.py",
        "tests/test_ffi_version.py",
        LOWERING_FOR_CUDA,
        "tests/test_errors.py",
    ],
    "jaxcomm/_primitive.py": ["tests/ops/test_psum.py", "tests/ops/test_all_gather.py", "tests/test_errors.py"],
    "jaxcomm/_processes/bootstrap.py": [
        "tests/test_distributed.py",
        LOWERING_FOR_CUDA,
        "tests/multiprocess/test_launchers.py",
    ],
    "jaxcomm/_processes/kv_store.py": ["tests/test_distributed.py"],
    "jaxcomm/_processes/launchers.py": ["tests/test_initialize.py"],
    "jaxcomm/_processes/placement.py": [
        "tests/test_distributed.py",
        "tests/multiprocess/test_compilation_cache.py",
    ],
    "jaxcomm/distributed.py": ["tests/test_initialize.py", "tests/test_distributed.py"],
    "jaxcomm/_cost_params.py": ["tests/plan/test_cost.py", "tests/test_calibrate.py", "tests/test_explain.py"],
    "jaxcomm/_topology.py": ["tests/test_explain.py", "tests/test_lowering.py", "tests/test_distributed.py"],
    "jaxcomm/ops/psum.py": ["tests/ops/test_psum.py", "tests/ops/test_pmean.py", "tests/ops/test_pmax.py", *OPS],
    "jaxcomm/ops/": ["tests/ops/test_{0}.py", "tests/ops/test_options_of_ops.py -k {0}-", *OPS],
    "jaxcomm/matmul/": [
        f"tests/matmul/test_{name}.py" for name in ("bad_input", "choice", "values", "transformations")
    ],
    "jaxcomm/bench/": [f"tests/{name}.py" for name in BENCH],
    "jaxcomm/info/": ["tests/test_info.py"],
    "jaxcomm/": ["tests/test_{0}.py"],
    "models/lm/train.py": ["tests/models/test_moe_command.py", "tests/models/test_moe_runs.py"],
    "models/lm/distributed.py": ["tests/models/test_moe_command.py", "tests/models/test_moe_processes.py"],
    "models/lm/config.py": ["tests/models/test_moe_options.py", "tests/models/test_scripts.py"],
    "models/lm/data.py": ["tests/models/test_moe_options.py", "tests/models/test_moe_runs.py"],
    "models/lm/": ["tests/models/test_scripts.py"],
    "models/moe/train.py": ["tests/models/test_moe_command.py", "tests/models/test_moe_runs.py"],
    "models/moe/config.py": ["tests/models/test_moe_options.py", "tests/models/test_moe_command.py"],
    "models/moe/": ["tests/models/test_moe_step.py", "tests/models/test_moe.py", "tests/models/test_moe_runs.py"],
}
SECONDS = 60  # limit of the tests of a file that run for one mutant; the fastest run first
FOLDERS = ("jaxcomm", "jaxcomm/ops", "jaxcomm/matmul", "jaxcomm/bench", "jaxcomm/info", "models/lm", "models/moe")


def tests(name):
    """The pytest arguments of a module."""
    for start, arguments in TESTS.items():
        if name.startswith(start):
            filled = [argument.format(pathlib.Path(name).stem.lstrip("_")) for argument in arguments]
            return [argument for argument in filled if (trees.ROOT / argument.split("::")[0].split(" ")[0]).exists()]
    return []


class Coverage(NamedTuple):
    """pytest without a mutant: seconds outside of tests, and (name, seconds, statements reached) of each test."""

    start: float
    outside: set
    tests: tuple


def place(name, line):
    """The first line of the statement of a mutant, or None if it is a definition, whose body other modules run."""
    found = None
    for node in ast.walk(ast.parse((trees.ROOT / name).read_text())):
        if isinstance(node, ast.stmt):
            first = lines.first_line(node)
            if first <= line <= node.end_lineno and (found is None or first >= found[0]):
                found = first, node
    if found is None or isinstance(found[1], (ast.ClassDef, ast.FunctionDef)):
        return None
    return found[0]


def copy(number):
    """A copy of the repository with the installed native modules."""
    tree = trees.BUILD / f"python-{number}"
    trees.copy(tree)
    for built in trees.installed():
        trees.put(tree / "jaxcomm" / built.name, built.read_bytes())
    return tree


class Runner:
    """One copy of the repository per job."""

    def __init__(self, jobs):
        self.covered, self.trees = {}, queue.Queue()
        for job in range(jobs):
            self.trees.put(copy(job))

    def prepare(self, mutants):
        """Runs the tests without a mutant and records statements and time of each test."""
        tree = self.trees.get()
        self.first, end = {}, 0
        for name in sorted({mutant.file for mutant in mutants}):
            self.first[name] = end
            end += (trees.ROOT / name).read_text().count("\n") + 2
        marks, found, log = (tree.with_suffix(suffix) for suffix in (".marks", ".json", ".log"))
        environment = {
            lines.VARIABLE: json.dumps(
                {"marks": str(marks), "first": {str(tree / name): number for name, number in self.first.items()}}
            ),
            "JAXCOMM_MUTANT_COVERAGE": str(marks),
            "JAXCOMM_MUTANT_TESTS": str(found),
        }
        for argument in sorted({argument for mutant in mutants for argument in tests(mutant.file)}):
            marks.write_bytes(bytes(end))
            arguments = ["-p", "mutation.per_test", *argument.split(" ")]
            run = trees.run_pytest(tree, arguments, 900, log, environment)
            passed = run.passed and trees.has_run(log)
            print(f"{run.seconds:7.1f} s  {argument}{'' if passed else ' fails without a mutant'}", flush=True)
            if passed:
                said = json.loads(found.read_text())
                each = tuple((name, duration, set(numbers)) for name, duration, numbers in said["tests"])
                start = max(0, run.seconds - sum(test[1] for test in each))
                self.covered[argument] = Coverage(start, set(said["outside"]), each)
            else:
                print(log.read_text(errors="replace")[-1500:])
        self.trees.put(tree)

    def reaching(self, mutant, coverage):
        """Returns the tests of a file that reach the mutant's statement, fastest first, and their seconds."""
        line = place(mutant.file, mutant.line)
        number = None if line is None else self.first[mutant.file] + line
        every = number is None or number in coverage.outside
        chosen, total = [], 0.0
        for name, seconds, reached in sorted(coverage.tests, key=lambda test: test[1]):
            if (every or number in reached) and (not chosen or total + seconds < SECONDS):
                chosen.append(name)
                total += seconds
        return chosen, coverage.start + total

    def judge(self, mutant, folder):
        code = operators.apply(trees.ROOT, mutant)
        if code is None:
            return None
        tree = self.trees.get()
        path, log = tree / mutant.file, tree.with_suffix(".log")
        path.write_text(code)
        total, caught, result, ran = 0.0, "", record.NOT_REACHED, None
        try:
            for argument in tests(mutant.file):
                if argument not in self.covered:
                    continue
                chosen, usual = self.reaching(mutant, self.covered[argument])
                if not chosen:
                    continue
                limit_s = 3 * usual + 10
                ran = trees.run_pytest(tree, chosen, limit_s, log)
                total += ran.seconds
                result = record.SURVIVED
                if not ran.passed:
                    caught = trees.failed(log) or argument
                    result = record.CAUGHT
                    break
            path.write_bytes((trees.ROOT / mutant.file).read_bytes())
            if ran and ran.timed_out:
                if not trees.is_mutant_slow(trees.run_pytest(tree, chosen, limit_s, log), limit_s):
                    print(f"{mutant.file}:{mutant.line}: no result, the machine is slow", flush=True)
                    return None
                result = record.TIMED_OUT
        finally:
            path.write_bytes((trees.ROOT / mutant.file).read_bytes())
            self.trees.put(tree)
        return record.Result(folder, *mutant[:5], result, caught, round(total, 1))


def generate(folder):
    names = [str(path.relative_to(trees.ROOT)) for path in sorted((trees.ROOT / folder).glob("*.py"))]
    return [mutant for name in names for mutant in operators.mutants(trees.ROOT, name)]


def run(folder, count, seed, jobs=2, only=None, file=None):
    """Runs `count` mutants of a folder (0: all), of one `file`, or those whose "file:line: change" contains `only`."""
    every = operators.mutants(trees.ROOT, file) if file else generate(folder)
    print(f"{folder}: {len(every)} mutants", flush=True)
    chosen = record.sample(every, count, seed, lambda mutant: mutant.kind, lambda mutant: mutant.key)
    if only:
        chosen = [mutant for mutant in every if only in f"{mutant.file}:{mutant.line}: {mutant.change}"]
    runner = Runner(jobs)
    runner.prepare(chosen)
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(lambda mutant: runner.judge(mutant, folder), chosen):
            if result:
                results.append(result)
            if result and not result.caught:
                print(record.describe(result), flush=True)
    return results
