"""Runs the tests against mutants of the C++ sources, which are generated from the syntax and share one build."""

import concurrent.futures
import json
import pathlib
import threading
from typing import NamedTuple

from . import record, schemata, trees


class Tests(NamedTuple):
    """Tests of a folder: folders of tests/ with programs of CTest, and arguments of separate runs of pytest."""

    native: tuple
    python: tuple = ()


PLAN = ("tests/plan/test_select.py", "tests/plan/test_cost.py", "tests/plan/test_validate.py")
TESTS = {
    "ffi/plan": Tests(("plan", "cpu"), (*PLAN, "tests/test_explain.py")),
    "ffi/cpu": Tests(("cpu", "transport")),
    "ffi/transport": Tests(("transport", "cpu")),
    "ffi/common": Tests(("common", "plan", "cpu"), ("tests/ops/test_psum.py",)),
    "ffi/recorder": Tests(
        ("recorder",), ("tests/multiprocess/test_recorder.py", "tests/multiprocess/test_recorder_files.py")
    ),
    "ffi/handlers": Tests((), ("tests/test_errors.py", "tests/test_compilation.py")),
    "ffi/cuda": Tests(("cuda",)),
}
PYTEST_SECONDS = 30  # limit of the tests of a file that run for one mutant; the fastest run first


class Coverage(NamedTuple):
    """A unit without a mutant: seconds, switches reached, and for pytest (name, seconds, switches) of each test."""

    seconds: float
    reached: set
    outside: set = frozenset()
    tests: tuple = ()


def cover(build, units):
    """Runs each unit without a mutant. Returns {name of the unit: Coverage}."""
    covered = {}
    for unit in units:
        path, tests, log = (build.place / name for name in ("coverage", "tests.json", "test.log"))
        path.write_bytes(bytes(build.end))
        tests.unlink(missing_ok=True)
        environment = {**unit.environment, "JAXCOMM_MUTANT_COVERAGE": str(path)}
        command = unit.command
        if unit.pytest:
            environment["JAXCOMM_MUTANT_TESTS"] = str(tests)
            command = (*command, "-p", "mutation.per_test")
        run = trees.run(command, unit.folder, 900, environment, log)
        if not run.passed or (unit.pytest and not trees.has_run(log)):
            print(f"{unit.name} fails without a mutant:\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            continue
        reached = {i for i, byte in enumerate(path.read_bytes()) if byte}
        covered[unit.name] = Coverage(run.seconds, reached)
        if unit.pytest:
            found = json.loads(tests.read_text())
            each = tuple((name, duration, set(switches)) for name, duration, switches in found["tests"])
            outside = set(found["outside"])
            covered[unit.name] = Coverage(run.seconds, outside.union(*(test[2] for test in each)), outside, each)
        if covered[unit.name].reached:
            print(f"{run.seconds:7.1f} s  {len(covered[unit.name].reached):6} reached  {unit.name}", flush=True)
    return covered


def command(unit, coverage, number):
    """Returns the command that runs the tests of a unit that reach a switch, and their usual seconds."""
    if not unit.pytest:
        return unit.command, coverage.seconds
    reaching = [test for test in coverage.tests if number in test[2] or number in coverage.outside]
    chosen, total = [], 0.0
    for name, seconds, _ in sorted(reaching, key=lambda test: test[1]):
        if not chosen or total + seconds < PYTEST_SECONDS:
            chosen.append(name)
            total += seconds
    start = coverage.seconds - sum(test[1] for test in coverage.tests)
    return trees.pytest(chosen), start + total


def judge(mutant, units, covered, folder):
    """Runs the tests that reach a mutant: programs before pytest, fast programs first. None: the machine is slow."""
    reaching = [unit for unit in units if unit.name in covered and mutant.place in covered[unit.name].reached]
    reaching.sort(key=lambda unit: (unit.pytest, 0 if unit.pytest else covered[unit.name].seconds))
    total, caught, result = 0.0, "", record.SURVIVED if reaching else record.NOT_REACHED
    for unit in reaching:
        words, normal = command(unit, covered[unit.name], mutant.place)
        environment = {**unit.environment, "JAXCOMM_MUTANT": str(mutant.place)}
        log = pathlib.Path(unit.folder).parent / f"{threading.get_ident()}.log" if unit.pytest else None
        limit_s = 3 * normal + 10
        run = trees.run(words, unit.folder, limit_s, environment, log)
        total += run.seconds
        if run.timed_out:
            again = trees.run(words, unit.folder, limit_s, unit.environment, log)
            if not trees.is_mutant_slow(again, limit_s):
                return None
        if not run.passed:
            caught = trees.failed(log) or unit.name
            result = record.TIMED_OUT if run.timed_out else record.CAUGHT
            break
    return record.Result(folder, *mutant[:5], result, caught, round(total, 1))


def run(folder, count, seed, jobs=2, only=None, python=True, file=None):
    """Runs `count` mutants of a folder (0: all), or those whose "file:line: change" contains `only`.

    `file`: only the mutants of this file that the folder's own native tests reach.
    """
    tests = Tests(TESTS[folder].native[:1]) if file else TESTS[folder]
    place = trees.BUILD / ("sample" if file else folder.replace("/", "-"))
    build = schemata.Build(place, [schemata.Sources(folder, file=file)], jobs=jobs)
    units = []
    if tests.native:
        units += build.native([f"tests/{name}/all" for name in tests.native], tests.native)
    if tests.python and python:
        units += build.python(tests.python)
    covered = cover(build, units)
    mutants = build.left()
    reached = set().union(*(coverage.reached for coverage in covered.values()))
    print(f"{folder}: {len(mutants)} mutants, {sum(m.place in reached for m in mutants)} reached", flush=True)
    if file:
        mutants = [mutant for mutant in mutants if mutant.place in reached]
    chosen = record.sample(mutants, count, seed, lambda mutant: mutant.kind, lambda mutant: mutant.key)
    if only:
        chosen = [mutant for mutant in mutants if only in f"{mutant.file}:{mutant.line}: {mutant.change}"]
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for mutant, result in zip(
            chosen, pool.map(lambda mutant: judge(mutant, units, covered, folder), chosen), strict=True
        ):
            if result is None:
                print(f"{mutant.file}:{mutant.line}: no result, the machine is slow", flush=True)
                continue
            results.append(result)
            if not result.caught:
                print(record.describe(result), flush=True)
    return results
