"""Runs mutation testing and reports which mutants the tests catch. See README.md in this folder."""

import argparse
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mutation import cxx, hand_run, prune, python, record, sample, trees

KINDS = ("cxx", "python", "hand")


def commit():
    """The hash of HEAD."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=trees.ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=KINDS, help="only mutants of this kind")
    parser.add_argument("--folder", action="append", help="a folder of sources, for example ffi/plan; may be repeated")
    parser.add_argument("--all", action="store_true", help="all generated mutants, instead of a sample of each folder")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants that record.csv lists as caught")
    parser.add_argument("--per-folder", type=int, default=60, metavar="N", help="generated mutants of each folder")
    parser.add_argument("--seed", help="of the selection; default: 1, with --sample the hash of HEAD")
    parser.add_argument("--match", help="only mutants whose 'file:line: change' contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel compilers and tests")
    parser.add_argument("--native", action="store_true", help="skips the Python tests of C++, whose build takes long")
    parser.add_argument("--hand-per-folder", type=int, default=0, metavar="N", help="hand-made mutants of each folder")
    parser.add_argument("--new", action="store_true", help="only hand-made mutants that record.csv lacks")
    parser.add_argument("--record", action="store_true", help="writes the results to record.csv and README.md")
    parser.add_argument(
        "--prune",
        action="store_true",
        help="removes mutants that no longer exist, and duplicates, from record.csv, and runs nothing",
    )
    options = parser.parse_args()
    count = 0 if options.all else options.per_folder
    folders = options.folder or [*cxx.TESTS, *python.FOLDERS]
    if options.prune:
        for row in prune.prune():
            print(f"{row.file}:{row.line}: {row.change}")
        record.write_table()
        print(record.table(record.read()))
        return 0
    results, unjudged = [], []
    if options.sample:
        seed = options.seed or commit()
        print(f"{options.sample} mutants, chosen by {seed}", flush=True)
        results = sample.run(options.sample, seed, folders, options.jobs, options.only)
        print(record.table(results))
        return 0 if all(result.caught for result in results) else 1
    seed = options.seed or "1"

    def done(found):
        results.extend(found)
        record.write(results, trees.BUILD / "results.csv")
        if options.record:
            record.merge(found)
            record.write_table()

    for folder in folders:
        if folder in cxx.TESTS and options.only in (None, "cxx"):
            done(cxx.run(folder, count, seed, options.jobs, options.match, not options.native))
        elif folder in python.FOLDERS and options.only in (None, "python"):
            done(python.run(folder, count, seed, options.jobs, options.match))
    if options.only in (None, "hand"):
        folders = options.folder or sorted({hand_run.folder(mutant) for mutant in hand_run.mutants()})
        chosen = hand_run.choose(options.hand_per_folder, seed, folders, options.match, options.new)
        _, unjudged = hand_run.run(chosen, options.jobs, done=lambda result: done([result]))
    missed = record.missed(results)
    for result in missed:
        print(record.describe(result))
    for mutant in unjudged:
        print(f"{mutant.file}: no result: {mutant.name}")
    print(record.table(results))
    return 1 if missed or unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
