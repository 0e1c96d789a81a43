"""Which NCCL the module opens, beyond test_nccl_library.cc. Libraries that only have NCCL's symbols replace NCCL."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

HEADER = (pathlib.Path(__file__).parents[2] / "ffi/cuda/nccl/nccl_library.h").read_text()
FUNCTIONS = [
    f"nccl{name}"
    for name in re.findall(r" F\((\w+)\)", HEADER[HEADER.index("define JAXCOMM_NCCL_FUNCTIONS(F)") :].split("\n\n")[0])
]
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda)
found = cuda.nccl(sys.argv[2])
assert cuda.nccl("") == found  # stays open
print(found["path"], found["version"])
"""


@pytest.fixture
def system(tmp_path):
    """A libnccl.so.2 with all functions."""
    functions = "".join(f"void {f}(void) {{}}\n" for f in FUNCTIONS[1:])
    functions += "int ncclGetVersion(int* version) { *version = 23007; return 0; }\n"
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(functions)
    compiler = (os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
    subprocess.run((*compiler, "-o", library, source), check=True, timeout=60)
    return str(library)


def opened(wheel, system):
    """Output of a fresh process that opens NCCL, given a wheel, with the system's in the loader's path."""
    module = importlib.util.find_spec("jaxcomm._cuda").origin
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, module, wheel),
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"LD_LIBRARY_PATH": str(pathlib.Path(system).parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_loaders_search_comes_last(system, wheels, tmp_path):
    assert FUNCTIONS[0] == "ncclGetVersion" and len(FUNCTIONS) == 22
    for wheel in ("", str(tmp_path / "gone.so")):
        assert opened(wheel, system) == f"{system} 23007"
    nccl = str(wheels / "nccl" / "lib" / "libnccl.so.2")
    assert opened(nccl, system) == f"{nccl} 23203"
