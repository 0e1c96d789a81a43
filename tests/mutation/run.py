"""Runs mutation testing and reports which mutants the tests catch. See README.md in this folder."""

import argparse
import collections
import csv
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mutation import mutants, runner

FOLDERS = (*mutants.CXX_TESTS, "jaxcomm", "jaxcomm/ops", "jaxcomm/matmul", "jaxcomm/moe", "models/lm", "models/moe")
SLOW = re.compile(r"test_cuda_|multiprocess|hosts|models|:")  # tests that take long to build or to run
# For continuous integration: of each kind, the share of the mutants, and the folders.
SAMPLE = {
    "cxx": (0.5, ("ffi/plan", "ffi/cpu", "ffi/transport", "ffi/recorder")),
    "python": (0.3, ("jaxcomm", "jaxcomm/ops", "jaxcomm/matmul")),
    "hand": (0.2, ()),
}
SAMPLE_S = 900
FILES = 3  # of one folder. Half of the mutants of a single file may be equivalent.


def chosen(found, seed):
    return sorted(found, key=lambda m: mutants.order(seed, m.file, m.old, m.new, m.name))


def sample(seed):
    """Lists of the mutants of each kind, with their number as a share. Those without a result are replaced."""
    for kind, (share, folders) in SAMPLE.items():
        if kind == "hand":
            quick = [
                m
                for m in mutants.by_hand()
                if not SLOW.search(m.tests) and (m.file[:4], ".py" in m.tests) != ("ffi/", True)
            ]
            yield kind, share, chosen(quick, seed)
            continue
        (folder, *_) = sorted(folders, key=lambda name: mutants.order(seed, name))
        every = [m for m in mutants.of_folder(folder) if m.tests and not SLOW.search(m.tests)]
        files = sorted({m.file for m in every}, key=lambda name: mutants.order(seed, name))[:FILES]
        # The folder's own programs.
        own = [m._replace(tests=m.tests.split()[0]) if kind == "cxx" else m for m in every if m.file in files]
        yield kind, share, chosen(own, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=SAMPLE, help="only mutants of this kind")
    parser.add_argument("--folder", action="append", help="a folder of sources, for example ffi/plan; may be repeated")
    parser.add_argument("--count", type=int, default=60, help="generated mutants of each folder; 0: all")
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants of some files and by hand, in 15 minutes")
    parser.add_argument("--seed", default="1", help="of the selection")
    parser.add_argument("--match", default="", help="only mutants whose 'file:line: name' contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel compilers and native tests")
    options = parser.parse_args()
    end = time.monotonic() + SAMPLE_S if options.sample else float("inf")
    if options.sample:
        parts = [(round(options.sample * share), found) for _, share, found in sample(options.seed)]
    else:
        parts = [(options.count, chosen(mutants.of_folder(name), options.seed)) for name in options.folder or FOLDERS]
        parts.append((0, mutants.by_hand()))
    results, run = [], runner.Runner(jobs=options.jobs)
    run.copy()
    for count, found in parts:
        found = [m for m in found if options.kind in (None, m.kind) and options.match in f"{m.place}: {m.name}"]
        if options.folder:
            found = [m for m in found if m.file.startswith(tuple(options.folder))]
        judged = 0
        for mutant in found:
            if (count and judged == count) or time.monotonic() > end:
                break
            result = run.judge(mutant)
            judged += result is not None
            if result:
                results.append((mutant, result))
                print(
                    f"{result:<9}  {mutant.place}: {mutant.name}: {mutant.old[:50]!r} -> {mutant.new[:50]!r}",
                    flush=True,
                )
    with (runner.PLACE / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows((result, *mutant) for mutant, result in results)
    table = collections.Counter((m.file.rpartition("/")[0], result) for m, result in results)
    for (folder, result), number in sorted(table.items()):
        print(f"{folder:<24} {result:<10} {number}")
    missed = [mutant.kind for mutant, result in results if result == runner.SURVIVED]
    allowed = sum(mutant.kind != "hand" for mutant, _ in results) / 2 if options.sample else 0
    return 1 if not results or "hand" in missed or len(missed) > allowed else 0


if __name__ == "__main__":
    sys.exit(main())
