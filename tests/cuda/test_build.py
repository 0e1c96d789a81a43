"""The module jaxcomm._cuda as `make cuda` builds it: imports without a driver, right architectures, no spills."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import ptxas
import pytest

from jaxcomm import _native
from jaxcomm.info import _capabilities as info

ROOT = pathlib.Path(__file__).parents[2]
MODULE = importlib.util.find_spec("jaxcomm._cuda")
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "ffi").rglob("*.cu"))


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def report(build, source):
    return (build / "CMakeFiles" / "_cuda.dir" / f"{source}.o.ptxas").read_text()


def test_imports_alone(wheels):
    """The module imports without a driver, JAX or other libraries of NVIDIA. NCCL is loaded when it is asked for."""
    program = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('_cuda', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.built(), m.driver_version() >= 0); "
        "print([line for line in open('/proc/self/maps') if 'nccl' in line or 'cudart' in line]); "
        "print(m.nccl(sys.argv[2]), m.nccl('') == m.nccl(sys.argv[2]))"
    )
    nccl = wheels / "nccl" / "lib" / "libnccl.so.2"
    built, loaded, found = run(sys.executable, "-I", "-c", program, MODULE.origin, nccl).splitlines()
    assert re.fullmatch(r"\{'cuda': 13000, 'nccl': 23203, 'gin': '2.32.3', 'architectures': '[^']+'\} True", built)
    assert loaded == "[]" and found == f"{{'path': '{nccl}', 'version': 23203}} True"


def test_installed_nccl_is_the_one_of_the_headers():
    """GIN needs equal versions, so the documented commands install the version of the headers of the build."""
    files = [(ROOT / name).read_text() for name in ("pyproject.toml", "cuda13/pyproject.toml")]
    pins = [pin for text in files for pin in re.findall(r'"nvidia-nccl-(cu1[23])([=<>~]+[\d.]+)"', text)]
    version = info.version(_native.cuda().built()["nccl"])
    assert pins == [(name, f"=={version}") for name in ["cu13"] * 4]


def code_in_the_module(wheels):
    """Architectures of the machine code and of the PTX in the module."""
    listing = run(wheels / "cu13" / "bin" / "cuobjdump", "--list-elf", "--list-ptx", MODULE.origin)
    return (
        set(re.findall(r"ELF file.*\.(sm_\d+)\.cubin", listing)),
        set(re.findall(r"PTX file.*\.(sm_\d+)\.ptx", listing)),
    )


def test_architectures(wheels):
    """Each architecture gets machine code and PTX, unless its name selects one of them."""
    words = _native.cuda().built()["architectures"].split()
    machine_code = {f"sm_{word.removesuffix('-real')}" for word in words if not word.endswith("-virtual")}
    ptx = {f"sm_{word.removesuffix('-virtual')}" for word in words if not word.endswith("-real")}
    assert code_in_the_module(wheels) == (machine_code, ptx)


@pytest.mark.full
@pytest.mark.machine_code
def test_machine_code_of_all_generations_and_ptx_of_the_newest(wheels):
    assert code_in_the_module(wheels) == ({"sm_80", "sm_90", "sm_100", "sm_120"}, {"sm_120"})
    assert _native.cuda().built()["architectures"] == "80-real 90-real 100-real 120"


@pytest.mark.full
@pytest.mark.machine_code
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_no_kernel_spills_registers(build, source, architectures):
    text = report(build, source)
    found = ptxas.kernels(text)
    assert {kernel.architecture for kernel in found} == set(architectures)
    ptxas.check_no_spills(found)
    assert ptxas.spill_bytes(text) == 0  # functions that kernels call


def test_a_spilling_kernel_is_found(wheels, tmp_path):
    (tmp_path / "spill.cu").write_text(
        """
        __global__ void __launch_bounds__(1024, 2) Spill(float* values) {
          float held[96];
          for (int i = 0; i < 96; ++i) held[i] = values[i * 1024 + threadIdx.x];
          __syncthreads();
          for (int i = 0; i < 96; ++i) values[i * 1024 + threadIdx.x] = held[95 - i] * held[i];
        }
        """
    )
    compile = (wheels / "cu13" / "bin" / "nvcc", "-arch=sm_90", "-Xptxas=-v", "-c", tmp_path / "spill.cu")
    run(sys.executable, ROOT / "cmake" / "keep_ptxas.py", *compile, "-o", tmp_path / "spill.o")
    (kernel,) = ptxas.kernels((tmp_path / "spill.o.ptxas").read_text())
    assert kernel.spill_bytes > 0
    with pytest.raises(AssertionError, match=r"registers are spilled by .*Spill"):
        ptxas.check_no_spills([kernel])
