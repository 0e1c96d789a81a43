"""Runs mutation testing and reports which mutants the tests catch. See README.md in this folder."""

import argparse
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mutation import cxx, hand, python, record, sample, trees

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
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, of four files and by hand")
    parser.add_argument("--per-folder", type=int, default=60, metavar="N", help="generated mutants of each folder")
    parser.add_argument("--seed", help="of the selection; default: 1, with --sample the hash of HEAD")
    parser.add_argument("--match", help="only mutants whose 'file:line: change' contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel compilers and tests")
    options = parser.parse_args()
    count = 0 if options.all else options.per_folder
    folders = options.folder or [*cxx.TESTS, *python.FOLDERS]
    results, unjudged = [], []
    if options.sample:
        seed = options.seed or commit()
        print(f"{options.sample} mutants, chosen by {seed}", flush=True)
        results = sample.run(options.sample, seed, options.jobs, options.only)
        record.write(results, trees.BUILD / "results.csv")
        for result in record.missed(results):
            print(record.describe(result))
        print(record.table(results))
        return 0 if record.sample_passes(results) else 1
    seed = options.seed or "1"

    for folder in folders:
        if folder in cxx.TESTS and options.only in (None, "cxx"):
            results += cxx.run(folder, count, seed, options.jobs, options.match)
        elif folder in python.FOLDERS and options.only in (None, "python"):
            results += python.run(folder, count, seed, options.jobs, options.match)
        record.write(results, trees.BUILD / "results.csv")
    if options.only in (None, "hand"):
        folders = options.folder or {hand.folder(mutant) for mutant in hand.mistakes()}
        found, unjudged = hand.run(hand.choose(seed, folders, options.match), options.jobs)
        results += found
        record.write(results, trees.BUILD / "results.csv")
    missed = record.missed(results)
    for result in missed:
        print(record.describe(result))
    for mutant in unjudged:
        print(f"{mutant.file}: no result: {mutant.name}")
    print(record.table(results))
    return 1 if missed or unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
