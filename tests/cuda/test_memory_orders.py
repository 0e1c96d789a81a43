"""Orders and scopes of the device API as nvcc compiles them. tests/cuda/test_litmus.cc checks the protocols, under the
assumption that each function is the instruction that this table names."""

import pathlib
import re
import subprocess

import jax
import pytest

FFI = pathlib.Path(__file__).parents[2] / "ffi"

# Function of the device API or of kernels/bulk_copy.cuh: a call of it, and its PTX.
ACCESSES = {
    "LoadAcquire": ("*out = LoadAcquire(word)", "ld.acquire.sys.b64"),
    "StoreRelease": ("StoreRelease(word, *out)", "st.release.sys.b64"),
    "LoadRelaxed": ("*out = LoadRelaxed(word)", "ld.relaxed.cta.b64"),
    "StoreRelaxed": ("StoreRelaxed(word, *out)", "st.relaxed.cta.b64"),
    "StoreToHost": ("StoreToHost(word, *out)", "st.relaxed.sys.b64"),
    "Claim": ("*out = Claim(word, 0, 1)", "atom.cas.relaxed.gpu.b64"),
    "FetchAdd": ("*out = FetchAdd(word, 1)", "atom.add.relaxed.cta.u64"),
    "LoadPair": ("LoadPair(word, out, out + 1)", "ld.relaxed.sys.global.v2.b64"),
    "StorePair": ("StorePair(word, *out, 0)", "st.relaxed.sys.global.v2.b64"),
    "FenceAliases": ("FenceAliases()", "fence.proxy.alias"),
    "MulticastSum": (
        "*unit = MulticastSum<jaxcomm::arithmetic::Plain<float>>(unit)",
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32",
    ),
    "MulticastStore": ("MulticastStore(unit, *unit)", "multimem.st.relaxed.sys.global.v4.f32"),
    "FenceAsyncGlobal": ("FenceAsyncGlobal()", "fence.proxy.async.global"),
    "FenceAsyncShared": ("FenceAsyncShared()", "fence.proxy.async.shared::cta"),
    "InitBulkBarrier": ("InitBulkBarrier(word)", "mbarrier.init.shared::cta.b64"),
    "ExpectBytes": ("ExpectBytes(word, 16)", "mbarrier.arrive.expect_tx.shared::cta.b64"),
    # Acquire and block scope are its defaults.
    "IsPhaseComplete": ("*out = IsPhaseComplete(word, 0)", "mbarrier.try_wait.parity.shared::cta.b64"),
    "LoadBulk": ("LoadBulk(word, unit, 16, word)", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"),
    "StoreBulk": (
        "StoreBulk(unit, word, 16)",
        "cp.async.bulk.global.shared::cta.bulk_group + cp.async.bulk.commit_group",
    ),
    "WaitForReads": ("WaitForReads<1>()", "cp.async.bulk.wait_group.read"),
    "WaitForStores": ("WaitForStores()", "cp.async.bulk.wait_group"),
}
# Thread groups: the barriers of AnyOf, which fakes/litmus.h treats as those of a part of the block.
BARRIERS = {
    "OfThread()": set(),
    "OfWarp()": {"vote.sync.any.pred", "bar.warp.sync"},
    "OfWarps(0, 2, 1)": {"barrier.red.or.pred"},
    "OfBlock()": {"bar.red.or.pred"},
}
SIGNALS = {"LoadAcquire", "StoreRelease", "LoadRelaxed", "StoreRelaxed", "StoreToHost", "Claim"}
BULK = {
    "FenceAsyncGlobal", "FenceAsyncShared", "InitBulkBarrier", "ExpectBytes", "IsPhaseComplete", "LoadBulk",
    "StoreBulk", "WaitForReads", "WaitForStores",
}  # fmt: skip
# Kernels of the module, by a part of their names, and the functions that they use.
KERNELS = {
    "ExecutePlanENS": SIGNALS | BULK,
    "FindOffsets": SIGNALS,
    r"RunCall\w*LlCall": SIGNALS | {"LoadPair", "StorePair"},
    r"RunCall\w*MultimemCall": SIGNALS | {"FenceAliases", "MulticastSum", "MulticastStore"},
    r"RunCall\w*RouteAndDispatchCall": SIGNALS | {"LoadPair", "StorePair"},
    r"RunCall\w*RowCall": SIGNALS | {"FenceAliases", "FetchAdd"},
    r"RunCall\w*SliceCall": SIGNALS | {"FenceAliases"} | BULK,
}
ORDERED = re.compile(r"^\s*(?:@\S+\s+)?((?:ld|st|atom|red|multimem|fence|membar|mbarrier|cp)\b[\w.:]*)", re.MULTILINE)


def ordered(ptx):
    """The instructions that take part in the order of threads: all but plain loads and stores."""
    found = {word.replace(".acc::f32", "") for word in ORDERED.findall(ptx)}
    return {
        word
        for word in found
        if not re.match(r"(ld|st)\.", word) or re.search(r"\.(acquire|release|relaxed|volatile|mmio|sc)\b", word)
    }


def instructions(names):
    return {word for name in names for word in ACCESSES[name][1].split(" + ")}


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(wheels, tmp_path_factory):
    """PTX of one kernel per function."""
    folder = tmp_path_factory.mktemp("orders")
    kernels = [
        f'extern "C" __global__ void {name}Kernel(uint64_t* word, uint64_t* out, Bytes16* unit) {{ {call}; }}\n'
        for name, (call, _) in ACCESSES.items()
    ]
    kernels += [
        f'extern "C" __global__ void Group{i}Kernel(uint64_t* out) {{ *out = AnyOf({group}, *out != 0); }}\n'
        for i, group in enumerate(BARRIERS)
    ]
    headers = "".join(
        f"#include <{header}>\n"
        for header in ("include/jaxcomm/device.h", "include/jaxcomm/multimem.h", "cuda/kernels/bulk_copy.cuh")
    )
    names = "using namespace jaxcomm::device;\nusing namespace jaxcomm::cuda;\n"
    (folder / "orders.cu").write_text(headers + names + "".join(kernels))
    output(
        wheels / "cu13" / "bin" / "nvcc", "-std=c++17", "-arch=sm_90", "-ptx", "-I", FFI,
        "-isystem", jax.ffi.include_dir(), folder / "orders.cu", "-o", folder / "orders.ptx",
    )  # fmt: skip
    texts = re.split(r"\.visible \.entry (\w+)Kernel\(", (folder / "orders.ptx").read_text())
    return dict(zip(texts[1::2], texts[2::2], strict=True))


@pytest.mark.parametrize("name", ACCESSES)
def test_each_function_is_its_instruction(compiled, name):
    assert ordered(compiled[name]) == instructions({name})


@pytest.mark.parametrize(("number", "group"), list(enumerate(BARRIERS)))
def test_each_group_has_its_barrier(compiled, number, group):
    found = re.findall(r"^\s+((?:bar|barrier|vote)\.[\w.]*)", compiled[f"Group{number}"], re.MULTILINE)
    assert {word.removesuffix(".aligned") for word in found} == BARRIERS[group]


def test_kernels_use_no_other_orders(build, wheels):
    (module,) = build.glob("_cuda.*.so")
    dumped = output(wheels / "cu13" / "bin" / "cuobjdump", "--dump-ptx", module)
    files = [text for text in re.split(r"^Fatbin ptx code:", dumped, flags=re.MULTILINE) if ".entry" in text]
    for kernel, functions in KERNELS.items():
        (ptx,) = (text for text in files if re.search(rf"\.entry \w*{kernel}", text))
        used = ordered(ptx)
        # Sums of f16 and bf16 differ from those of f32 in their types only.
        used = {re.sub(r"\.v4\.(bf16x2|f16x2)$", ".v4.f32", word) for word in used}
        assert used == instructions(functions), kernel
