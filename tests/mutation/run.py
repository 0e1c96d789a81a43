"""Puts mistakes into the sources and tells which the tests catch. See README.md beside it."""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mutation import cxx, hand_run, python, record, trees

KINDS = ("cxx", "python", "hand")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=KINDS, help="mutants of this kind")
    parser.add_argument("--folder", action="append", help="of the sources, for example ffi/plan; several times for several")
    parser.add_argument("--all", action="store_true", help="all mutants, instead of a sample of each folder")
    parser.add_argument("--per-folder", type=int, default=60, metavar="N", help="generated mutants of each folder")
    parser.add_argument("--seed", default="1", help="chooses them")
    parser.add_argument("--match", help="instead: those whose 'file:line: change' contains this")
    parser.add_argument("--jobs", type=int, default=2, help="compilers and tests at a time")
    parser.add_argument("--native", action="store_true", help="leaves out Python tests of C++, which take long to build for")
    parser.add_argument("--record", action="store_true", help="writes the results into record.csv")
    options = parser.parse_args()
    count = 0 if options.all else options.per_folder
    folders = options.folder or [*cxx.TESTS, *python.FOLDERS]
    results = []

    def done(found):
        results.extend(found)
        record.write(results, trees.BUILD / "results.csv")
        if options.record:
            record.merge(found)

    for folder in folders:
        if folder in cxx.TESTS and options.only in (None, "cxx"):
            done(cxx.run(folder, count, options.seed, options.jobs, options.match, not options.native))
        elif folder in python.FOLDERS and options.only in (None, "python"):
            done(python.run(folder, count, options.seed, options.jobs, options.match))
    if options.only in (None, "hand"):
        chosen = [mutant.name for mutant in hand_run.mutants() if hand_run.folder(mutant) in folders]
        done(hand_run.run(0, options.seed, options.jobs, options.match, chosen))
    missed = record.missed(results)
    for result in missed:
        print(record.describe(result))
    print(record.table(results))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
