"""Every wait of the host in ffi/cuda has a limit: calls that wait without one are in the file that bounds them only.

The tests of these files check that the limits hold, with fakes that never complete.
"""

import pathlib
import re

import pytest

CUDA = pathlib.Path(__file__).resolve().parents[2] / "ffi" / "cuda"

# Pattern -> the files that may contain it, each with the reason.
WAITS = {
    # No limit at all: query instead (nccl/wait_for_stream.h).
    r"cuda(Stream|Event|Device|Ctx)Synchronize": {},
    r"cudaMem(cpy|set)(2D|3D)?\(": {},
    r"cudaStreamWaitValue|cuStreamWaitValue": {},
    r"cudaLaunchHostFunc": {},
    # Wait for the GPU, so for kernels, which end within their own timeouts.
    r"\bcudaFree\(": {"nccl/device_memory.cc": "memory of a call that has ended"},
    r"cudaFreeHost": {"nccl/device_memory.cc": "memory of an exchange that has ended"},
    r"cudaStreamDestroy|cudaGraph": {},
    # NCCL waits for peers.
    r"CommInitRankConfig\(": {"nccl/nccl_calls.cc": "on a thread of its own"},
    r"CommInitRank\(|CommInitAll|CommDestroy\(|CommFinalize|CommWindowDeregister\(": {
        "nccl/capabilities.cc": "on a thread of its own",
    },
    r"CommSplit|CommShrink|CommGrow": {},
    r"blocking = 1": {"nccl/nccl_calls.cc": "on a thread of its own"},
    r"CommAbort\(|CommRevoke\(": {
        "nccl/nccl_calls.cc": "ncclCommRevoke, on a thread of its own",
        "nccl/capabilities.cc": "on a thread of its own",
    },
    r"(\.|->)CommWindowRegister\(": {"nccl/symmetric_memory.cc": "on a thread of its own"},
    r"\bdev_comm_create\(": {"nccl/gin_version.cc": "on a thread of its own (runtime/communicator.cc)"},
    r"\bnccl(_|\(\))?(\.|->)AllGather\(": {"nccl/bootstrap.cc": "on a thread of its own"},
    r"GroupEnd\(": {
        "nccl/capabilities.cc": "on a thread of its own",
    },
    # Threads and condition variables.
    r"\.wait\(|\.join\(": {},
    r"std::thread\(|std::async|\.detach\(": {"nccl/threads.cc": "they end before the process does"},
}


def code(path):
    """The text without comments and strings."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    return re.sub(r'"(\\.|[^"\\])*"', '""', text)


SOURCES = {
    str(path.relative_to(CUDA)): code(path)
    for path in sorted(CUDA.rglob("*"))
    if path.suffix in {".cc", ".h", ".cu", ".cuh"} and path.name != "nccl_library.h"
}


@pytest.mark.parametrize("pattern", WAITS)
def test_waits_without_a_limit_are_where_they_are_bounded(pattern):
    found = {name for name, text in SOURCES.items() if re.search(pattern, text)}
    assert found == set(WAITS[pattern])
