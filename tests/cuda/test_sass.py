"""The compiled code of loops over data: enough loads are in flight to fill NVLink from 32 multiprocessors."""

import pathlib
import re
import subprocess

import pytest
import sass

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "ffi" / "cuda" / "kernels"


def run(*command, **options):
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, **options)


LOOPS = """
#include <jaxcomm/device.h>
using namespace jaxcomm;
struct Args { char* to; const char* from[16]; int num_sources; int64_t count; };
__global__ void __launch_bounds__(384, 1) CopyLoop(const __grid_constant__ Args args) {
  device::Copy(args.to, args.from[0], args.count);
}
template <typename Codec>
__global__ void __launch_bounds__(384, 1) ReduceLoop(const __grid_constant__ Args args) {
  using T = typename Codec::Storage;
  device::Reduce<Codec, arithmetic::Sum>(reinterpret_cast<T*>(args.to), args.num_sources,
      [&](int s) { return reinterpret_cast<const T*>(args.from[s]); }, args.count);
}
template __global__ void ReduceLoop<arithmetic::Plain<float>>(const __grid_constant__ Args);
template __global__ void ReduceLoop<arithmetic::Widened<BFloat16>>(const __grid_constant__ Args);
"""
BULK_LOOP = """
#include "cuda/kernels/bulk_copy.cuh"
namespace jaxcomm {
__global__ void __launch_bounds__(384, 1) CopyLoop(const __grid_constant__ device::Comm comm,
    const __grid_constant__ ::jaxcomm::cuda::BulkStages stages, char* to, const char* from, int64_t bytes) {
  ::jaxcomm::cuda::BulkCopies(comm, 0, stages, device::DynamicShared()).Copy(to, from, bytes);
}
}
"""


def stages(name):
    """Number of stages and bytes of each, of ffi/cuda/program/bulk_ring.h."""
    text = (ROOT / "ffi" / "cuda" / "program" / "bulk_ring.h").read_text()
    num, size, shift = re.search(rf"BulkStages {name} = {{(\d+), (\d+) << (\d+)}};", text).groups()
    return int(num), int(size) << int(shift)


def functions(text):
    """The code of each function, by its name."""
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check(found, name, threads, architecture, bursts):
    """At least so many bursts of this function hold the bytes that Little's law asks for."""
    enough = [burst for burst in found if burst.bytes * threads >= sass.needed(architecture)]
    assert len(enough) >= bursts, (
        f"{name} on {architecture}: {found}, {threads} threads, {sass.needed(architecture):.0f} B"
    )


def check_bulk_copies(text, architecture, shape):
    """Copies through shared memory: of all stages but one, the loads are in flight. Waits are those of the protocol."""
    num, stage_bytes = stages(shape)
    assert (num - 1) * stage_bytes >= 2 * sass.needed(architecture)  # 16 SMs fill the link
    words = r"\b(UBLKCP\.[A-Z.]+|DEPBAR\.LE \w+, \w+|FENCE\.VIEW\.ASYNC\.G)"
    # Also functions that are in the section of a kernel.
    parts = re.split(r"^(?:\.text\.|\$[\w$]*\$)(\w+):$", text, flags=re.MULTILINE)
    found = {name: re.findall(words, code) for name, code in zip(parts[1::2], parts[2::2], strict=True)}
    (push,) = [name for name, code in found.items() if "PushBulk" in name and code]
    (finish,) = [name for name, code in found.items() if "FinishBulk" in name and code]
    # Between two loads, the store of the oldest piece, and no wait but that for the reads of all stores but the last.
    assert found[push] == ["UBLKCP.G.S", "DEPBAR.LE SB0, 0x1", "UBLKCP.S.G"]
    # The end waits for the writes.
    assert found[finish] == ["UBLKCP.G.S", "DEPBAR.LE SB0, 0x0", "FENCE.VIEW.ASYNC.G"]
    others = [word for name, code in found.items() if name not in (push, finish) for word in code]
    assert others and set(others) == {"FENCE.VIEW.ASYNC.G"}  # before the first load


# Architecture, source, threads, {function: (number of such functions, bursts of each)}, stages of bulk copies.
COPY = {"CopyUnits.*Bytes16": (1, 2)}  # body and tail
SUM = {"CopyMoves.*Bytes16": (1, 2), "CopyTokens.*Bytes16": (1, 2), "AddTokens(?!.*Li1ENS0_12EqualChoices)": (4, 1)}
COMPILED = [
    # Reductions: up to 4 sources and more than 4; tails are the same code.
    ("sm_90", LOOPS, 384, COPY | {"ReduceLoop": (2, 2)}, None),
    ("sm_90", BULK_LOOP, 384, {}, "kPlanStages"),
    ("sm_90", KERNELS / "rows.cu", 512, SUM, None),
    ("sm_90", KERNELS / "slices.cu", 512, COPY, "kSliceStages"),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            ("sm_100", LOOPS, 384, COPY | {"ReduceLoop": (2, 2)}, None),
            ("sm_100", BULK_LOOP, 384, {}, "kPlanStages"),
            ("sm_90", KERNELS / "route_and_dispatch.cu", 512, {}, None),
            ("sm_90", KERNELS / "inter_node_rows.cu", 512, {}, None),
            ("sm_90", ROOT / "examples/all_gather_matmul/all_gather_matmul.cu", 6 * 32, COPY, None),  # that send
        ]
    ],
]


@pytest.mark.parametrize(("architecture", "source", "threads", "expected", "bulk"), COMPILED)
def test_loops_fill_the_link(wheels, tmp_path, architecture, source, threads, expected, bulk):
    if isinstance(source, str):
        (tmp_path / "loops.cu").write_text(source)
        source = tmp_path / "loops.cu"
    cubin = tmp_path / "loops.cubin"
    run(
        wheels / "cu13" / "bin" / "nvcc", f"-arch={architecture}", "-std=c++17", "-cubin", "-I", ROOT / "ffi",
        "-I", ROOT / "ffi" / "include", "-I", wheels / "nccl" / "include", source, "-o", cubin,
    )  # fmt: skip
    text = sass.disassemble(wheels, cubin)
    found = sass.bursts(text)
    for words, (number, bursts) in expected.items():
        names = [name for name in found if re.search(words, name)]
        assert len(names) == number, (words, list(found))
        for name in names:
            check(found[name], name, threads, architecture, bursts)
    if bulk:
        check_bulk_copies(text, architecture, bulk)
    code = functions(text)
    # The cache for constants is not coherent: a load could return bytes from before a peer's write. NCCL reads through
    # it, a byte or two of its own.
    for name, body in code.items():
        assert not re.search(r"\bLDG?\.E\.(?!U8|U16)[A-Z0-9.]*CONSTANT", body), name
        kernel = "RunCall" in name or "OnRails" in name
        assert kernel or source.name not in ("route_and_dispatch.cu", "inter_node_rows.cu") or "STL" not in body, name
    if source.is_relative_to(ROOT / "examples"):
        for body in (body for name, body in code.items() if "Kernel" in name and "NodeKernel" not in name):
            # The block's barrier is that of IsAborted. All others are of groups of warps, which do not wait for each
            # other.
            barriers = re.findall(r"\bBAR\.\w+\.\S* (\w+)", body)
            assert barriers.count("0x0") == 1
            assert (len(barriers) > 4) == (source.stem == "all_gather_matmul")


def of_bytes(name):
    return re.search(r"Plain<?I[ahb]E|AnyFloat8", name) is not None


def loops(name):
    """Bytes have one for every number of sources, and complex128 has none but that of single elements."""
    return 1 if of_bytes(name) or "ComplexId" in name else 2


@pytest.mark.full
@pytest.mark.machine_code
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kernel", ["executor", "executor_gin"])
def test_every_kernel_fills_the_link(build, wheels, tmp_path, kernel, architecture):
    built = build / "CMakeFiles" / "_cuda.dir" / "ffi" / "cuda" / "kernels" / f"{kernel}.cu.o"
    run(wheels / "cu13" / "bin" / "cuobjdump", "-xelf", architecture, built, cwd=tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    text = sass.disassemble(wheels, cubin)
    for name, body in functions(text).items():
        # NCCL's GIN, which is inlined there, loads its own constants.
        assert "ExecutePlanGin" in name or not re.search(r"\bLDG?\.[A-Z0-9.]*CONSTANT", body), name
    threads = int(re.search(r"constexpr int k\w*Threads = (\d+)", (KERNELS / f"{kernel}.cu").read_text())[1])
    found = sass.bursts(text)
    reductions = [name for name in found if "ReduceRange" in name]
    assert len(reductions) > 30
    for name in reductions:
        if of_bytes(name) and architecture == "sm_100":
            continue  # bytes move 8 at a time: their accumulators need the registers
        check(found[name], name, threads, architecture, loops(name))
    (copy,) = [name for name in found if "CopyUnits" in name and "Bytes16" in name]
    check(found[copy], copy, threads, architecture, 2)
    check_bulk_copies(text, architecture, "kPlanStages")
