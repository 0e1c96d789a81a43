"""What a mutant of a kernel is, and the files that have some."""

from typing import NamedTuple

PORTABLE = "ffi/include/jaxcomm/portable.h"
SYNC = "ffi/include/jaxcomm/sync.h"
COPY = "ffi/include/jaxcomm/copy.h"
BLOCK = "ffi/include/jaxcomm/block.h"
FLAGGED = "ffi/include/jaxcomm/flagged.h"
FLAGGED_CALL = "ffi/cuda/flagged.cuh"
MULTIMEM = "ffi/cuda/multimem.cuh"
EXAMPLE = "examples/fused_rmsnorm/fused_rmsnorm.cuh"
EXECUTOR = "ffi/cuda/executor.cuh"
LOCATE = "ffi/cuda/locate.cuh"
PROGRAM = "ffi/cuda/program.cc"
CALL_PROGRAM = "ffi/cuda/call_program.cc"
GIN = "ffi/cuda/gin_network.cuh"
PACKING = "ffi/cuda/packing.cc"
ROUNDS = "ffi/cuda/rounds.cc"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str = "executor"
