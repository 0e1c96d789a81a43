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
INSTALL = "Install version 2.32.3 of the wheel that JAX's plugin uses, nvidia-nccl-cu12 or nvidia-nccl-cu13, never both"
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda)
try:
    found = cuda.nccl(sys.argv[2])
    assert cuda.nccl("") == found  # stays open
    print(found["path"], found["version"])
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def fake(tmp_path):
    """Makes a libnccl.so.2 in a folder of its own, with all functions except some."""

    def make(name, without=()):
        functions = "".join(f"void {f}(void) {{}}\n" for f in FUNCTIONS[1:] if f not in without)
        functions += "int ncclGetVersion(int* version) { *version = 23007; return 0; }\n"
        (tmp_path / name).mkdir()
        source, library = tmp_path / name / "nccl.c", tmp_path / name / "libnccl.so.2"
        source.write_text(functions)
        compiler = (os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
        subprocess.run((*compiler, "-o", library, source), check=True, timeout=60)
        return str(library)

    return make


@pytest.fixture
def opened(tmp_path):
    """Output of a fresh process that opens NCCL, given a wheel and the loader's folder."""

    def run(wheel, loader=None):
        if loader is None:  # a file that is not a library hides the system's library
            (tmp_path / "nothing").mkdir(exist_ok=True)
            loader = tmp_path / "nothing" / "libnccl.so.2"
            loader.write_text("no library at all, but long enough to be asked for what ELF files begin with" * 9)
        environment = os.environ | {"LD_LIBRARY_PATH": str(pathlib.Path(loader).parent)}
        module = importlib.util.find_spec("jaxcomm._cuda").origin
        done = subprocess.run(
            (sys.executable, "-c", PROGRAM, module, wheel),
            capture_output=True, text=True, timeout=60, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_names():
    assert FUNCTIONS[0] == "ncclGetVersion"
    assert len(FUNCTIONS) == 22


def test_the_loaders_search_comes_last(fake, opened, tmp_path):
    system = fake("system")
    assert opened("", loader=system) == f"{system} 23007"
    assert opened(str(tmp_path / "gone.so"), loader=system) == f"{system} 23007"


def test_none(opened, tmp_path):
    said = opened(str(tmp_path / "gone.so"))
    assert said.startswith(f"no NCCL: {tmp_path}/gone.so: cannot open shared object file: No such file or directory; ")
    assert said.endswith(f"invalid ELF header. {INSTALL}")


def test_a_missing_function(fake, opened):
    trimmed = fake("trimmed", without=("ncclCommQueryProperties",))
    assert opened(trimmed) == f"{trimmed} lacks ncclCommQueryProperties. {INSTALL}"


def test_nccl_itself(wheels, opened):
    library = str(wheels / "nccl" / "lib" / "libnccl.so.2")
    assert opened(library) == f"{library} 23203"
