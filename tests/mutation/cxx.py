"""Runs the tests against mutants of the C++ sources, which are generated from the syntax and share one build."""

import concurrent.futures
from typing import NamedTuple

from . import record, schemata, trees

TESTS = {  # folders of tests/ with programs of CTest
    "ffi/plan": ("plan", "cpu"),
    "ffi/cpu": ("cpu", "transport"),
    "ffi/transport": ("transport", "cpu"),
    "ffi/common": ("common", "plan", "cpu"),
    "ffi/recorder": ("recorder",),
    "ffi/cuda": ("cuda",),
}


class Coverage(NamedTuple):
    """A unit without a mutant: seconds, and switches reached."""

    seconds: float
    reached: set


def cover(build, units):
    """Runs each unit without a mutant. Returns {name of the unit: Coverage}."""
    covered = {}
    for unit in units:
        path, log = build.place / "coverage", build.place / "test.log"
        path.write_bytes(bytes(build.end))
        environment = {**unit.environment, "JAXCOMM_MUTANT_COVERAGE": str(path)}
        run = trees.run(unit.command, unit.folder, 900, environment, log)
        if not run.passed:
            print(f"{unit.name} fails without a mutant:\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            continue
        found = covered[unit.name] = Coverage(run.seconds, {i for i, byte in enumerate(path.read_bytes()) if byte})
        if found.reached:
            print(f"{run.seconds:7.1f} s  {len(found.reached):6} reached  {unit.name}", flush=True)
    return covered


def judge(mutant, units, covered, folder):
    """Runs the units that reach a mutant, the fastest first. None: the machine is slow."""
    reaching = [unit for unit in units if unit.name in covered and mutant.place in covered[unit.name].reached]
    reaching.sort(key=lambda unit: covered[unit.name].seconds)
    total, caught, result = 0.0, "", record.SURVIVED if reaching else record.NOT_REACHED
    for unit in reaching:
        environment = {**unit.environment, "JAXCOMM_MUTANT": str(mutant.place)}
        limit_s = 3 * covered[unit.name].seconds + 10
        run = trees.run(unit.command, unit.folder, limit_s, environment)
        total += run.seconds
        if run.timed_out:
            again = trees.run(unit.command, unit.folder, limit_s, unit.environment)
            if not trees.is_mutant_slow(again, limit_s):
                return None
        if not run.passed:
            caught, result = unit.name, record.TIMED_OUT if run.timed_out else record.CAUGHT
            break
    return record.Result(folder, *mutant[:5], result, caught, round(total, 1))


def run(folder, count, seed, jobs=2, only=None, files=()):
    """Runs `count` mutants of a folder (0: all), or those whose "file:line: change" contains `only`.

    `files`: only the mutants of these files that the folder's own tests reach.
    """
    tests = TESTS[folder][:1] if files else TESTS[folder]
    place = trees.BUILD / ("sample" if files else folder.replace("/", "-"))
    build = schemata.Build(place, [schemata.Sources(folder, files=files)], jobs=jobs)
    units = build.native([f"tests/{name}/all" for name in tests], tests)
    covered = cover(build, units)
    mutants = build.left()
    reached = set().union(*(coverage.reached for coverage in covered.values()))
    print(f"{folder}: {len(mutants)} mutants, {sum(m.place in reached for m in mutants)} reached", flush=True)
    if files:
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
