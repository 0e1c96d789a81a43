"""Breaks the GPU's executor, device API or example in one place at a time. The emulated tests must fail each time.

    mutants.py --library build/thread/libjaxcomm_native.a --sanitize thread

A mutant that survives shows unnecessary code or a weak test.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from kernel_mutant import CALL_PROGRAM, PACKING, PLAN, PROGRAM, ROUTE_AND_DISPATCH_ARGS, ROW_ARGS, Mutant
from mutants_of_bulk_copies import BULK
from mutants_of_data import DATA
from mutants_of_groups import GROUPS
from mutants_of_memory import MODEL
from mutants_of_networks import PLAIN
from mutants_of_order import THREAD
from mutants_of_rails import RAILED
from mutants_of_route_and_dispatch import ONE_SHOT
from mutants_of_rows import ROUTED
from mutants_of_slices import SLICED

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIMIT_S = 300  # of one compilation or run; a mutant may hang


class Build:
    """Compiles tests from copies of the sources; objects that a mutant does not touch are shared."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path) -> None:
        self.args = args
        self.folder = folder
        self.flags = ["-std=c++17", "-O1", "-pthread", "-DJAXCOMM_TEST_ONE_TYPE"]
        if args.sanitize:
            self.flags += [f"-fsanitize={args.sanitize}", "-g1"]
        self.objects: dict[str, pathlib.Path] = {}

    def copy(self, name: str) -> pathlib.Path:
        tree = self.folder / name
        for part in ("ffi", "examples", "tests/cuda"):
            shutil.copytree(ROOT / part, tree / part)
        for part in ("check.h", "check.cc", "main.cc"):
            shutil.copy(ROOT / "tests" / part, tree / "tests" / part)
        # The tests use three types; the others would take most of the time to compile.
        reductions = tree / "ffi" / "cuda" / "kernels" / "reductions.h"
        text = re.sub(r"    JAXCOMM_CASE\((?!kF32,|kS32,|kS8,).*\n", "", reductions.read_text())
        reductions.write_text(text)
        return tree

    def compile(self, tree: pathlib.Path, source: str) -> pathlib.Path:
        output = tree / (pathlib.Path(source).stem + ".o")
        litmus = "test_litmus" in source
        define = f'-DJAXCOMM_EMULATION="{tree}/tests/cuda/fakes/{"litmus" if litmus else "emulation"}.h"'
        include = [f"-I{tree}/ffi", f"-I{tree}/ffi/include"]
        # The memory model defines the functions that this instrumentation calls.
        hooks = ["-fsanitize=thread"] if litmus else []
        command = [self.args.compiler, *self.flags, *hooks, define, *include, "-c", tree / source, "-o", output]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return output

    def link(self, output: pathlib.Path, objects: list[pathlib.Path]) -> pathlib.Path:
        command = [self.args.compiler, *self.flags, *objects, self.args.library, "-ldl", "-o", output]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return output


def run(program: pathlib.Path) -> str:
    """A short description of the failure; empty if there was none."""
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    try:
        done = subprocess.run(
            [program], env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "stuck"
    if done.returncode == 0:
        return ""
    telling = [line for line in done.stderr.splitlines() if line.strip("= ") and not line.endswith(" ...")]
    return telling[0].strip()[:100] if telling else f"status {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libjaxcomm_native.a, built with the same sanitizer")
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--sanitize", default="", choices=["", "thread"])
    parser.add_argument("--only", default="", help="mutants whose names match this expression")
    args = parser.parse_args()
    mutants = [
        mutant
        for mutant in (
            THREAD if args.sanitize else PLAIN + DATA + MODEL + ROUTED + ONE_SHOT + RAILED + SLICED + GROUPS + BULK
        )
        if re.search(args.only, mutant.name)
    ]
    tests = sorted({mutant.test for mutant in mutants})

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        build = Build(args, pathlib.Path(folder))
        tree = build.copy("sound")
        sources = {test: f"tests/cuda/test_{test}.cc" for test in tests}
        # Not in a header.
        parts = {"plan": PLAN, "packer": PACKING, "programs": PROGRAM, "call_program": CALL_PROGRAM}
        parts |= {
            "route_and_dispatch_args": ROUTE_AND_DISPATCH_ARGS,
            "inter_node_row_args": "ffi/cuda/program/inter_node_row_args.cc",
            "row_args": ROW_ARGS,
            "slice_args": "ffi/cuda/program/slice_args.cc",
        }
        parts |= {"cases": "tests/check.cc", "main": "tests/main.cc"}
        models = {name: f"tests/cuda/fakes/{name}.cc" for name in ("memory_model", "memory_model_explore")}
        if not any(test.startswith("litmus") for test in tests):
            models = {}
        sources |= parts | models

        def used_by(test: str) -> dict[str, pathlib.Path]:
            return {name: sound[name] for name in (test, *parts, *(models if test.startswith("litmus") else ()))}

        sound = dict(zip(sources, pool.map(lambda source: build.compile(tree, source), sources.values()), strict=True))

        def check_sound(test: str) -> bool:
            program = build.link(tree / f"test_{test}", list(used_by(test).values()))
            fault = run(program)
            print(f"{'FAILS: ' + fault if fault else 'passes'}: test_{test} of the sources as they are", flush=True)
            return not fault

        def check(mutant: Mutant) -> bool:
            began = time.monotonic()
            copy = build.copy(mutant.name.replace(" ", "_"))
            text = (copy / mutant.file).read_text()
            if text.count(mutant.old) != 1:
                print(f"NOT APPLICABLE: {mutant.name}: {mutant.file} has the text {text.count(mutant.old)} times")
                return False
            (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new))
            broken = next((name for name, file in parts.items() if file == mutant.file), mutant.test)
            used = used_by(mutant.test)
            used[broken] = build.compile(copy, sources[broken])
            fault = run(build.link(copy / "test", list(used.values())))
            shutil.rmtree(copy)
            print(
                f"{'noticed' if fault else 'SURVIVES'}: {mutant.name} ({time.monotonic() - began:.0f} s): {fault}",
                flush=True,
            )
            return bool(fault)

        passing = pool.map(check_sound, tests)
        noticed = pool.map(check, mutants)
        ok = all([*passing, *noticed])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
