"""Which NCCL is opened, and the errors if it cannot be used. Libraries that only have NCCL's symbols replace NCCL."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

HEADER = (pathlib.Path(__file__).parents[2] / "ffi/cuda/nccl/nccl_library.h").read_text()
NEEDED, OPTIONAL = (
    [f"nccl{name}" for name in re.findall(r"F\((\w+)\)", HEADER[HEADER.index(f"define {macro}(F)") :].split("\n\n")[0])]
    for macro in ("JAXCOMM_NCCL_NEEDED", "JAXCOMM_NCCL_OPTIONAL")
)
INSTALL = "Install version 2.32.3 of the wheel that JAX's plugin uses, nvidia-nccl-cu12 or nvidia-nccl-cu13, never both"
PROGRAM = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda)
for library in sys.argv[3:]:
    ctypes.CDLL(library)
try:
    found = cuda.nccl(sys.argv[2])
    assert cuda.nccl("") == found  # stays open
    print(found["path"], found["version"], *found["missing"])
    if "ncclCommQueryProperties" in found["missing"]:
        cuda.communicator_properties("", [0])
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def fake(tmp_path):
    """Makes a libnccl.so.2 in a folder of its own, with a version and with all functions except some."""

    def make(name, version=23007, without=()):
        functions = "".join(f"void {f}(void) {{}}\n" for f in (*NEEDED[1:], *OPTIONAL) if f not in without)
        if "ncclGetVersion" not in without:
            functions += f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}\n"
        (tmp_path / name).mkdir()
        source, library = tmp_path / name / "nccl.c", tmp_path / name / "libnccl.so.2"
        source.write_text(functions)
        compiler = (os.environ.get("CC", "cc"), "-w", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
        subprocess.run((*compiler, "-o", library, source), check=True, timeout=60)
        return str(library)

    return make


@pytest.fixture
def opened(tmp_path):
    """Output of a fresh process that opens NCCL, given a wheel, libraries loaded before, and the loader's folder."""

    def run(wheel, *loaded, loader=None):
        if loader is None:  # a file that is not a library hides the system's library
            (tmp_path / "nothing").mkdir(exist_ok=True)
            loader = tmp_path / "nothing" / "libnccl.so.2"
            loader.write_text("no library at all, but long enough to be asked for what ELF files begin with" * 9)
        environment = os.environ | {"LD_LIBRARY_PATH": str(pathlib.Path(loader).parent)}
        module = importlib.util.find_spec("jaxcomm._cuda").origin
        done = subprocess.run(
            (sys.executable, "-c", PROGRAM, module, wheel, *loaded),
            capture_output=True, text=True, timeout=60, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_names():
    assert NEEDED[0] == "ncclGetVersion"
    assert len(NEEDED) + len(OPTIONAL) == 22


def test_the_loaded_copy_comes_first(fake, opened):
    loaded, wheel, system = fake("loaded"), fake("wheel"), fake("system")
    assert opened(wheel, loaded, loader=system) == f"{loaded} 23007"


def test_the_wheel_comes_second(fake, opened):
    wheel, system = fake("wheel", version=23203), fake("system")
    assert opened(wheel, loader=system) == f"{wheel} 23203"


def test_the_loaders_search_comes_last(fake, opened, tmp_path):
    system = fake("system")
    assert opened("", loader=system) == f"{system} 23007"
    assert opened(str(tmp_path / "gone.so"), loader=system) == f"{system} 23007"


def test_none(opened, tmp_path):
    said = opened(str(tmp_path / "gone.so"))
    assert said.startswith(f"no NCCL: {tmp_path}/gone.so: cannot open shared object file: No such file or directory; ")
    assert said.endswith(f"invalid ELF header. {INSTALL}")


def test_too_old(fake, opened):
    old = fake("old", version=22809, without=OPTIONAL)
    assert opened(old) == f"{old} is NCCL 2.28.9, but jaxcomm needs 2.30.7 or later. {INSTALL}"


def test_too_old_but_loaded(fake, opened):
    """A newer library beside it would be a second copy, which cannot use JAX's communicators."""
    old, new = fake("old", version=23006), fake("new")
    assert opened(new, old) == (
        f"{old}, which this process had loaded before, is NCCL 2.30.6, but jaxcomm needs 2.30.7 or later. {INSTALL}"
    )


def test_a_library_without_the_functions_of_nccl(fake, opened):
    other = fake("other", without=("ncclGetVersion", "ncclAllGather"))
    assert opened(other) == f"{other} lacks ncclGetVersion, ncclAllGather. {INSTALL}"


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_functions(name, fake, opened):
    trimmed = fake("trimmed", without=(name,))
    said = f"{trimmed} 23007 {name}"
    if name == "ncclCommQueryProperties":
        said += f"\n{trimmed} (NCCL 2.30.7) has no function ncclCommQueryProperties"
    assert opened(trimmed) == said


def test_nccl_itself(wheels, opened):
    library = str(wheels / "nccl" / "lib" / "libnccl.so.2")
    assert opened(library) == f"{library} 23203"
