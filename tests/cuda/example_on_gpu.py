"""Ring 2: builds examples/fused_rmsnorm against the installed jaxcomm, outside the tree, and runs it on the GPUs.

    python tests/cuda/example_on_gpu.py [processes]

Needs what the example's README names, cmake and ninja. With a number it runs in as many processes, one GPU each.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

import jaxcomm

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "fused_rmsnorm"


def main() -> None:
    processes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(EXAMPLE, pathlib.Path(folder, "example"))
        build = pathlib.Path(folder, "build")
        run = (copy / "run.py", build / "libfused_rmsnorm.so")
        for command in (
            ("cmake", "-S", copy, "-B", build, "-G", "Ninja", "-DCMAKE_CUDA_ARCHITECTURES=native",
             f"-Djaxcomm_ROOT={jaxcomm.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"),
            ("cmake", "--build", build),
            (sys.executable, *(("-m", "jaxcomm.run", "-n", *processes) if processes else ()), *run),
        ):  # fmt: skip
            subprocess.run(command, check=True, cwd=folder)


if __name__ == "__main__":
    main()
