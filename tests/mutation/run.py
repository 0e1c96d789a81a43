"""Puts mistakes into the sources and tells which the tests catch. See README.md beside it."""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mutation import cxx, record, trees


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", action="append", help="of the sources, for example ffi/plan; several times for several")
    parser.add_argument("--per-folder", type=int, default=60, metavar="N", help="mutants of each folder; 0 means all")
    parser.add_argument("--seed", default="1", help="chooses them")
    parser.add_argument("--match", help="instead: those whose 'file:line: change' contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--native", action="store_true", help="leaves the Python tests out, which take long to build for")
    parser.add_argument("--record", action="store_true", help="writes the results into record.csv")
    options = parser.parse_args()
    results = []
    for folder in options.folder or cxx.TESTS:
        found = cxx.run(folder, options.per_folder, options.seed, options.jobs, options.match, not options.native)
        results += found
        record.write(results, trees.BUILD / "results.csv")
        if options.record:
            record.merge(found, {folder})
    missed = record.missed(results)
    for result in missed:
        print(record.describe(result))
    print(record.table(results))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
