"""Collectives for JAX: plans that are checked, costed and executed inside jit(shard_map(...))."""

import importlib.metadata

from jaxcomm import _installed, distributed, moe, recorder, transfer  # noqa: F401 (_installed: the first import checks the folder)
from jaxcomm._calibrate import Calibration, calibrate
from jaxcomm._explain import Explanation, algorithms, explain
from jaxcomm._ffi import ffi_call, register_ffi_target
from jaxcomm._installed import get_cmake_dir, get_include
from jaxcomm._native import check
from jaxcomm._pending import Pending
from jaxcomm._reshard import reshard
from jaxcomm._topology import Link, Topology, make_mesh, topology
from jaxcomm.distributed import register
from jaxcomm.info import Info, info
from jaxcomm.matmul import all_gather_matmul, matmul_psum_scatter
from jaxcomm.ops.all_gather import all_gather, all_gather_start
from jaxcomm.ops.all_to_all import all_to_all, all_to_all_start
from jaxcomm.ops.barrier import barrier
from jaxcomm.ops.pbroadcast import pbroadcast, pbroadcast_start
from jaxcomm.ops.ppermute import ppermute, ppermute_start
from jaxcomm.ops.psum import pmax, pmean, pmin, psum, psum_start
from jaxcomm.ops.psum_scatter import psum_scatter, psum_scatter_start
from jaxcomm.ops.ragged_all_to_all import ragged_all_to_all
from jaxcomm.ops.reshard_in import RankSharding, reshard_in, reshard_in_start

__version__ = importlib.metadata.version("jaxcomm")

__all__ = [
    "Calibration",
    "Explanation",
    "Info",
    "Link",
    "Pending",
    "RankSharding",
    "Topology",
    "algorithms",
    "all_gather",
    "all_gather_matmul",
    "all_gather_start",
    "all_to_all",
    "all_to_all_start",
    "barrier",
    "calibrate",
    "check",
    "distributed",
    "explain",
    "ffi_call",
    "get_cmake_dir",
    "get_include",
    "info",
    "make_mesh",
    "matmul_psum_scatter",
    "moe",
    "pbroadcast",
    "pbroadcast_start",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "ppermute_start",
    "psum",
    "psum_scatter",
    "psum_scatter_start",
    "psum_start",
    "ragged_all_to_all",
    "recorder",
    "register",
    "register_ffi_target",
    "reshard",
    "reshard_in",
    "reshard_in_start",
    "topology",
    "transfer",
]
