"""Mutants of the Python sources, made by operators of cosmic-ray, and whether the tests of their module catch them."""

import concurrent.futures
import pathlib
import queue

from . import operators, record, trees

OP_TESTS = "tests/ops/test_{0}.py"
# Tests of a module, one pytest run each, those that find most first. {0} is the module's name.
TESTS = {
    "jaxcomm/__init__.py": ["tests/test_contract.py"],
    "jaxcomm/_check.py": ["tests/test_errors.py", "tests/ops/test_psum.py", "tests/ops/test_all_gather.py"],
    "jaxcomm/_compat.py": ["tests/test_interfaces.py", "tests/ops/test_psum.py", "tests/test_errors.py"],
    "jaxcomm/_config.py": ["tests/test_config.py", "tests/test_errors.py"],
    "jaxcomm/_interfaces.py": ["tests/test_interfaces.py"],
    "jaxcomm/_lowering.py": ["tests/test_lowering.py", "tests/test_compilation.py", "tests/ops/test_psum.py"],
    "jaxcomm/_native.py": ["tests/test_headers.py", "tests/cuda/test_cuda_lowering.py", "tests/test_errors.py"],
    "jaxcomm/_primitive.py": ["tests/ops/test_psum.py", "tests/ops/test_all_gather.py", "tests/test_errors.py"],
    "jaxcomm/_bootstrap.py": ["tests/test_distributed.py", "tests/multiprocess/test_launchers.py"],
    "jaxcomm/_kv_store.py": ["tests/test_distributed.py", "tests/multiprocess/test_placement.py"],
    "jaxcomm/_launchers.py": ["tests/test_initialize.py"],
    "jaxcomm/_placement.py": ["tests/test_distributed.py", "tests/multiprocess/test_placement.py"],
    "jaxcomm/distributed.py": ["tests/test_initialize.py", "tests/test_distributed.py"],
    "jaxcomm/_cost_params.py": ["tests/plan/test_cost.py", "tests/test_calibrate.py", "tests/test_explain.py"],
    "jaxcomm/_topology.py": ["tests/test_explain.py", "tests/test_lowering.py", "tests/test_distributed.py"],
    "jaxcomm/ops/psum.py": ["tests/ops/test_psum.py", "tests/ops/test_pmean.py", "tests/ops/test_pmax.py"],
    "jaxcomm/ops/": ["tests/ops/test_{0}.py", "tests/test_errors.py", "tests/test_contract.py"],
    "jaxcomm/bench/": ["tests/test_bench.py"],
    "jaxcomm/info/": ["tests/test_info.py"],
    "jaxcomm/": ["tests/test_{0}.py"],
    "models/moe/": ["tests/models/test_moe_step.py", "tests/models/test_moe_options.py", "tests/models/test_moe.py"],
}
FOLDERS = ("jaxcomm", "jaxcomm/ops", "jaxcomm/bench", "jaxcomm/info", "models/moe")


def tests(name):
    """The pytest arguments of a module."""
    for start, arguments in TESTS.items():
        if name.startswith(start):
            filled = [argument.format(pathlib.Path(name).stem.lstrip("_")) for argument in arguments]
            return [argument for argument in filled if (trees.ROOT / argument.split("::")[0].split(" ")[0]).exists()]
    return []


class Runner:
    """Copies of the repository, one for each job."""

    def __init__(self, jobs):
        self.limits = {}
        self.trees = queue.Queue()
        built = sorted(trees.installed().glob("_core*.so"))[0]
        for job in range(jobs):
            tree = trees.BUILD / f"python-{job}"
            trees.copy(tree)
            trees.put(tree / "jaxcomm" / built.name, built.read_bytes())
            self.trees.put(tree)

    def pytest(self, tree, argument, limit_s):
        log = tree.with_suffix(".log")
        return trees.run(trees.pytest(argument.split(" ")), tree, limit_s, trees.python_environment(tree), log)

    def prepare(self, mutants):
        """Without a mutant: how long do the tests take?"""
        tree = self.trees.get()
        for argument in sorted({argument for mutant in mutants for argument in tests(mutant.file)}):
            passed, seconds = self.pytest(tree, argument, 900)
            print(f"{seconds:7.1f} s  {argument}{'' if passed else ' fails without a mutant'}", flush=True)
            if passed:
                self.limits[argument] = seconds
            else:
                print(tree.with_suffix(".log").read_text(errors="replace")[-1500:])
        self.trees.put(tree)

    def judge(self, mutant, folder):
        code = operators.apply(trees.ROOT, mutant)
        if code is None:
            return None
        tree = self.trees.get()
        path = tree / mutant.file
        path.write_text(code)
        total, caught, ran = 0.0, "", 0
        try:
            for argument in tests(mutant.file):
                if argument not in self.limits:
                    continue
                passed, seconds = self.pytest(tree, argument, 3 * self.limits[argument] + 10)
                total += seconds
                ran += 1
                if not passed:
                    caught = trees.failed(tree.with_suffix(".log")) or argument
                    break
        finally:
            path.write_bytes((trees.ROOT / mutant.file).read_bytes())
            self.trees.put(tree)
        result = record.CAUGHT if caught else record.SURVIVED if ran else record.NOT_REACHED
        return record.Result(folder, *mutant[:5], result, caught, round(total, 1))


def generate(folder):
    names = [str(path.relative_to(trees.ROOT)) for path in sorted((trees.ROOT / folder).glob("*.py"))]
    return [mutant for name in names for mutant in operators.mutants(trees.ROOT, name)]


def run(folder, count, seed, jobs=2, only=None):
    every = generate(folder)
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
