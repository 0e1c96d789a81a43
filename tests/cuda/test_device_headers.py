"""The installed headers of the device API: each compiles on its own, and with the example of a user's kernel."""

import ctypes
import functools
import importlib
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import ptxas
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _native

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "ffi" / "include" / "jaxcomm"
HEADERS = sorted(path.name for path in SOURCES.iterdir())
EXAMPLE, RING = (ROOT / "examples" / name for name in ("fused_rmsnorm", "all_gather_matmul"))
NODES = ROOT / "tests" / "cuda" / "node_all_gather.cuh"
TOOLS = pathlib.Path(sys.executable).parent


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def toolkit(wheels):
    return wheels / "cu13"


@pytest.fixture
def user(tmp_path):
    """Compiles headers as the first lines of a user's program."""

    def compile(headers, suffix, *command):
        source = tmp_path / f"user{suffix}"
        source.write_text("".join(f"#include <jaxcomm/{header}>\n" for header in headers))
        include = ("-I", jaxcomm.get_include(), "-isystem", jax.ffi.include_dir())
        run(*command, "-std=c++17", *include, "-c", source, "-o", tmp_path / "user.o")

    return compile


def test_installed_headers_equal_the_sources():
    installed = pathlib.Path(jaxcomm.get_include()) / "jaxcomm"
    assert sorted(path.name for path in installed.iterdir()) == HEADERS
    for header in HEADERS:
        assert (installed / header).read_bytes() == (SOURCES / header).read_bytes(), f"{header}: install jaxcomm anew"


@pytest.mark.parametrize("header", HEADERS)
def test_each_compiles_without_cuda(user, header):
    compiler = os.environ.get("CXX", "c++")
    user([header], ".cc", compiler, "-fsyntax-only", "-Wall", "-Wextra", "-Werror")


NVCC_FLAGS = ("-arch=sm_90", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra")


def nccl(wheels):
    """gin.h includes NCCL's headers."""
    return ("-isystem", wheels / "nccl" / "include")


@pytest.mark.full
@pytest.mark.parametrize("header", HEADERS)
def test_each_compiles_with_nvcc(user, toolkit, wheels, header):
    user([header], ".cu", toolkit / "bin" / "nvcc", *NVCC_FLAGS, *nccl(wheels))


def test_the_kernel_of_several_nodes_compiles_with_nvcc(toolkit, wheels, tmp_path):
    source = tmp_path / "all_gather.cu"
    source.write_text(f'#include "{NODES}"\nconst void* kernel = (const void*)node_all_gather::Kernel;\n')
    include = ("-I", jaxcomm.get_include(), *nccl(wheels))
    command = (toolkit / "bin" / "nvcc", "-std=c++17", *NVCC_FLAGS, "-Xptxas=-v", *include, "-c", source)
    done = subprocess.run([*command, "-o", tmp_path / "all_gather.o"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (kernel,) = ptxas.kernels(done.stdout + done.stderr)
    ptxas.check_no_spills([kernel])


@pytest.mark.parametrize(("language", "least"), [("cpp", 7), ("python", 2)])
def test_the_quoted_code_is_run(language, least):
    page = (ROOT / "docs" / "guide" / "device-kernels.md").read_text()
    page += (ROOT / "docs" / "reference" / "device-api.md").read_text()
    quoted = re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    # LL messages are not in the example. A test contains the code of the documentation for them.
    sources = [path for folder in (EXAMPLE, RING) for path in folder.iterdir() if path.is_file()]
    sources += [ROOT / "tests" / "cuda" / "test_device_api.cc", NODES]
    run_somewhere = {line.strip() for path in sources for line in path.read_text().splitlines()}
    assert len(quoted) >= least
    assert {line.strip() for block in quoted for line in block.splitlines()} <= run_somewhere


def build_example(folder, toolkit, architectures, tmp_path_factory):
    """The copy of the folder, outside the tree, and its build, which is made as its README describes."""
    example, build = tmp_path_factory.mktemp("example"), tmp_path_factory.mktemp("build")
    for source in folder.iterdir():
        if source.is_file():
            (example / source.name).write_bytes(source.read_bytes())
    numbers = ";".join(f"{name.removeprefix('sm_')}-real" for name in architectures)
    run(
        TOOLS / "cmake", "-S", example, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
        f"-Djaxcomm_ROOT={jaxcomm.get_cmake_dir()}", f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DNCCL_INCLUDE_DIR={toolkit.parent / 'nccl' / 'include'}",
        f"-DCMAKE_CUDA_ARCHITECTURES={numbers}",
        f"-DCMAKE_CUDA_FLAGS=-L{toolkit / 'lib'} -Xptxas=-v -Werror=all-warnings -Xcompiler=-Wall,-Wextra",
        f"-DCMAKE_CUDA_COMPILER_LAUNCHER={sys.executable};{ROOT / 'cmake' / 'keep_ptxas.py'}",
    )  # fmt: skip
    run(TOOLS / "cmake", "--build", build)
    return example, build


@pytest.fixture(scope="module")
def built(toolkit, architectures, tmp_path_factory):
    """Returns the copy of an example and its build. Builds each example once."""
    return functools.cache(lambda folder: build_example(folder, toolkit, architectures, tmp_path_factory))


# nvcc compiles one example. The emulated tests compile the kernels of the others too.
@pytest.mark.parametrize(
    ("folder", "types"),
    [(EXAMPLE, (False, True)), pytest.param(RING, (False, False, True, True), marks=pytest.mark.full)],
)
def test_no_kernel_of_the_examples_spills_registers(folder, types, architectures, built, monkeypatch):
    example, build = built(folder)
    (report,) = build.rglob("*.cu.o.ptxas")
    kernels = ptxas.kernels(report.read_text())
    compiled = sorted((kernel.architecture, "BFloat16" in kernel.name) for kernel in kernels)
    assert compiled == sorted((name, bf16) for name in architectures for bf16 in types)
    ptxas.check_no_spills(kernels)
    monkeypatch.syspath_prepend(example)
    importlib.import_module(folder.name).register(build / f"lib{folder.name}.so")


@pytest.fixture
def module(built, monkeypatch):
    """The example's module for JAX, with its library."""
    folder, build = built(EXAMPLE)
    monkeypatch.syspath_prepend(folder)
    imported = importlib.import_module("fused_rmsnorm")
    imported.register(build / "libfused_rmsnorm.so")
    return imported


# Without a GPU, the tests check only the compiled program.
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_example_is_called_from_jax(module, mesh, check_vma):
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((16, 32), (4, 32), (32,))]

    def body(x, residual, weight):
        return module.fused_rmsnorm(x, residual, weight, "gpu", 1e-5)

    specs = {"in_specs": (P("gpu"), P(), P()), "out_specs": P(), "check_vma": check_vma}
    f = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    text = f.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    ((operands, attributes),) = re.findall(r"custom_call @fused_rmsnorm_BF16\((.*?)\)(.*)", text)
    assert len(operands.split(",")) == 3
    call = re.search(r"jaxcomm = \{(.*?)\}", attributes)[1]
    for where, part in (
        (attributes, r"epsilon = 9\.99999974E-6 : f32"),
        (attributes, r"jaxcomm_groups = dense<\[0, 1, 2, 3, 4, 5, 6, 7\]> : tensor<8xi64>"),
        (attributes, "has_side_effect = true"),
        (call, "group_size = 4 : i64"),
        (call, "max_sms = 0 : i64"),
        (call, r'site = "fused_rmsnorm\.py:\d+ \(fused_rmsnorm\)"'),
        (call, 'target = "fused_rmsnorm_BF16"'),
    ):
        assert re.search(part, where), part


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_ring_is_called_from_jax(mesh, monkeypatch, check_vma):
    monkeypatch.syspath_prepend(RING)
    module = importlib.import_module("all_gather_matmul")
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 32), (32, 24))]
    specs = {"in_specs": (P("gpu"), P(None, "gpu")), "out_specs": P(None, "gpu"), "check_vma": check_vma}
    f = jax.jit(jax.shard_map(lambda x, w: module.all_gather_matmul(x, w, "gpu"), mesh=mesh, **specs))
    text = f.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"custom_call @all_gather_matmul_F32.*: \((.*?)\) -> (tensor<\w+>)", text)
    assert found == [("tensor<4x32xf32>, tensor<32x6xf32>", "tensor<16x6xf32>")]
    with pytest.raises(TypeError, match="all_gather_matmul: w has type bfloat16, expected that of x: float32"):
        module.all_gather_matmul(*(jax.numpy.ones((4, 4), dtype) for dtype in ("float32", "bfloat16")), "gpu")


def test_the_state_of_a_call_is_made_from_its_attributes(module, built):
    """XLA:CPU has no stage Initialize, so the call fails when it runs."""
    _native.register()
    stages = _native.cuda().user_stages()
    library = ctypes.CDLL(built(EXAMPLE)[1] / "libfused_rmsnorm.so")
    handler = jax.ffi.pycapsule(library.FusedRmsnormExecuteF32)
    jax.ffi.register_ffi_type("jaxcomm_user_call", _native.cuda().user_state_type(), platform="cpu")
    jax.ffi.register_ffi_target("fused_rmsnorm_F32", {"instantiate": stages["instantiate"], "execute": handler}, "cpu")
    line = jax.make_mesh((1,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x, residual, weight):
        return module.fused_rmsnorm(x, residual, weight, "gpu")

    f = jax.jit(jax.shard_map(body, mesh=line, in_specs=P(), out_specs=P(), check_vma=False))
    x = np.ones((4, 32), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="GPU"):
        jax.block_until_ready(f(x, x, x[0]))
    bad = jax.jit(
        jax.shard_map(
            lambda x: jax.ffi.ffi_call("fused_rmsnorm_F32", jax.typeof(x))(x),
            mesh=line, in_specs=P(), out_specs=P(), check_vma=False,
        )
    )  # fmt: skip
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"not a call of jaxcomm\.ffi_call"):
        bad(x)


def test_a_library_that_does_not_fit(module, tmp_path):
    source, path = tmp_path / "other.cc", tmp_path / "other.so"
    handlers = {"initialize": "Handler", "execute": "Handler"}
    source.write_text('extern "C" void Handler() {}\n')
    compiler = (os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o")
    run(*compiler, path, source)
    with pytest.raises(AttributeError, match=r"was compiled without jaxcomm/host\.h"):
        jaxcomm.register_ffi_target("other", ctypes.CDLL(path), **handlers)
    with pytest.raises(AttributeError, match="Missing"):
        jaxcomm.register_ffi_target("other", ctypes.CDLL(path), initialize="Missing", execute="Handler")
    source.write_text(source.read_text() + 'extern "C" const char* jaxcomm_use_host_api(void*) { return "0.0.7"; }\n')
    run(*compiler, tmp_path / "old.so", source)
    with pytest.raises(
        RuntimeError, match=r"old\.so was compiled with the headers of jaxcomm 0\.0\.7, but jaxcomm 0\."
    ):
        jaxcomm.register_ffi_target("other", ctypes.CDLL(tmp_path / "old.so"), **handlers)


@pytest.mark.parametrize("name", ["fused_rmsnorm", "all_gather_matmul"])
def test_the_comparison_finds_a_wrong_kernel(name, monkeypatch):
    """compare.py, with plain JAX in place of the kernel: right, wrong in one element, and wrong on one rank."""
    monkeypatch.syspath_prepend(RING.parent)
    monkeypatch.syspath_prepend(RING.parent / name)
    compare, reference = importlib.import_module("compare"), importlib.import_module(name).reference
    line = jax.make_mesh((4,), (compare.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    def wrong(*operands):
        results, tree = jax.tree.flatten(reference(*operands))
        on_last = (jax.lax.axis_index(compare.AXIS) == 3).astype(results[-1].dtype)
        return tree.unflatten([*results[:-1], results[-1].at[-1].add(on_last)])

    sizes = compare.COMPARISONS[name].sizes[1]
    for dtype in compare.COMPARISONS[name].tolerance:
        assert compare.worst_error(name, reference, reference, line, sizes, dtype) == 0
        assert compare.worst_error(name, wrong, reference, line, sizes, dtype) > 1
