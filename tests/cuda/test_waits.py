"""Every wait of the host in ffi/cuda has a limit: calls that wait without one are in the file that bounds them only.

The tests of these files check that the limits hold, with fakes that never complete. Programs with other waits of CUDA
or NCCL do not link with these fakes.
"""

import pathlib
import re

import pytest

CUDA = pathlib.Path(__file__).resolve().parents[2] / "ffi" / "cuda"

# Pattern -> the files that may contain it. NCCL waits for peers, on threads of its own. What is freed has no user left.
WAITS = {
    r"(\.|->)(CommInitRank|CommDestroy|CommAbort|GroupEnd)\(": {"nccl/capabilities.cc"},
    r"(\.|->)(CommInitRankConfig|CommRevoke)\(|blocking = 1": {"nccl/nccl_calls.cc"},
    r"(\.|->)CommWindowRegister\(": {"nccl/symmetric_memory.cc"},
    r"\bdev_comm_create\(": {"nccl/gin_version.cc"},
    r"\bnccl(_|\(\))?(\.|->)AllGather\(": {"nccl/bootstrap.cc"},
    r"\bcudaFree(Host)?\(": {"nccl/device_memory.cc"},
    r"\.wait\(|\.join\(": set(),
    r"std::thread\(|std::async|\.detach\(": {"nccl/threads.cc"},
}


@pytest.mark.parametrize("pattern", WAITS)
def test_waits_without_a_limit_are_where_they_are_bounded(pattern):
    sources = {
        str(path.relative_to(CUDA)): re.sub(r"//[^\n]*", "", path.read_text())
        for path in CUDA.rglob("*")
        if path.suffix in {".cc", ".h", ".cu", ".cuh"}
    }
    assert {name for name, text in sources.items() if re.search(pattern, text)} == WAITS[pattern]
