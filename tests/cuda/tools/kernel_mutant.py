"""The type of a kernel mutant, and the files with mutants."""

from typing import NamedTuple

PORTABLE = "ffi/include/jaxcomm/portable.h"
SYNC = "ffi/include/jaxcomm/sync.h"
COMM = "ffi/include/jaxcomm/comm.h"
THREADS = "ffi/include/jaxcomm/threads.h"
COUNTERS = "ffi/include/jaxcomm/counters.h"
COPY = "ffi/include/jaxcomm/copy.h"
REDUCE = "ffi/include/jaxcomm/reduce.h"
MULTICAST = "ffi/include/jaxcomm/multimem.h"
REDUCTIONS = "ffi/cuda/kernels/reductions.h"
BLOCK = "ffi/include/jaxcomm/block.h"
LL = "ffi/include/jaxcomm/ll.h"
LL_CALL = "ffi/cuda/kernels/ll.cuh"
MULTIMEM = "ffi/cuda/kernels/multimem.cuh"
ROWS = "ffi/cuda/kernels/rows.cuh"
ROW_LOOPS = "ffi/cuda/kernels/row_loops.cuh"
ROUTE_AND_DISPATCH = "ffi/cuda/kernels/route_and_dispatch.cuh"
ROUTE_AND_DISPATCH_ARGS = "ffi/cuda/program/route_and_dispatch_args.cc"
RAIL_DISPATCH = "ffi/cuda/kernels/rail_dispatch.cuh"
RAIL_CALL = "ffi/cuda/kernels/rail_call.cuh"
RAIL_COMBINE = "ffi/cuda/kernels/rail_combine.cuh"
INTER_NODE_ROW_ARGS = "ffi/cuda/program/inter_node_row_args.h"
ROW_ARGS = "ffi/cuda/program/row_args.cc"
BULK_COPY = "ffi/cuda/kernels/bulk_copy.cuh"
SLICES = "ffi/cuda/kernels/slices.cuh"
SLICE_ARGS = "ffi/cuda/program/slice_args.h"
EXAMPLE = "examples/fused_rmsnorm/fused_rmsnorm.cuh"
DISPATCH = "examples/token_dispatch/token_dispatch.cuh"
RING = "examples/all_gather_matmul/all_gather_matmul.cuh"
NODE_RING = "examples/all_gather_matmul/node_ring.cuh"
EXECUTOR = "ffi/cuda/kernels/executor.cuh"
OFFSETS = "ffi/cuda/kernels/exchange_offsets.cuh"
KERNEL_ARGS = "ffi/cuda/program/kernel_args.h"
PLAN = "ffi/plan/plan.cc"
PROGRAM = "ffi/cuda/program/program.cc"
CALL_PROGRAM = "ffi/cuda/program/call_program.cc"
GIN = "ffi/include/jaxcomm/gin.h"
GIN_NETWORK = "ffi/cuda/kernels/gin_network.cuh"
NODES = "tests/cuda/node_all_gather.cuh"
PACKING = "ffi/cuda/program/packing.cc"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str = "executor"
