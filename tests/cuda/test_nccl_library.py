"""Which NCCL the module opens, beyond test_nccl_library.cc: the one of a wheel, and the one that the loader finds."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
cuda = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda)
found = cuda.nccl(sys.argv[2])
assert cuda.nccl("") == found  # stays open
print(found["path"], found["version"])
"""


@pytest.mark.parametrize("given", ["", "/no/such/libnccl.so.2", "wheel"])
def test_the_loaders_search_comes_last(wheels, tmp_path, given):
    """`system` has a link to the library."""
    nccl, system = wheels / "nccl" / "lib" / "libnccl.so.2", tmp_path / "libnccl.so.2"
    system.symlink_to(nccl)
    module = importlib.util.find_spec("jaxcomm._cuda").origin
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, module, str(nccl) if given == "wheel" else given),
        capture_output=True, text=True, timeout=60, env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == f"{nccl if given == 'wheel' else system} 23203", done.stderr
