"""Level 2: builds one of examples/ against the installed jaxcomm, outside the tree, and runs it on the GPUs.

    python tests/cuda/tools/example_on_gpu.py fused_rmsnorm <architecture> [processes]    # 90, or native

Needs what the README of the example names, cmake and ninja. With a number of processes it runs in as many.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jaxcomm

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def main() -> None:
    name, architecture, *processes = sys.argv[1:]
    # As for users: Python finds modules in the folder of the script.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(EXAMPLES / name, pathlib.Path(folder, name))
        build = pathlib.Path(folder, "build")
        run = (shutil.copy(EXAMPLES / "compare.py", folder), name, build / f"lib{name}.so")
        for command in (
            ("cmake", "-S", copy, "-B", build, "-G", "Ninja", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}",
             f"-Djaxcomm_ROOT={jaxcomm.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"),
            ("cmake", "--build", build),
            (sys.executable, *(("-m", "jaxcomm.run", "-n", *processes) if processes else ()), *run),
        ):  # fmt: skip
            subprocess.run(command, check=True, cwd=folder, env=environment)


if __name__ == "__main__":
    main()
