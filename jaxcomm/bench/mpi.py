"""MPI with the signatures of jax.lax, for one device per process: mpi4py on its own, and mpi4jax inside jit.

Both work on the block of this process. A class has one method for each operation that its library has; mpi4jax has no
reduce_scatter.
"""

from typing import Any

import numpy as np

# The NumPy types that mpi4py supports.
DTYPES = ("float32", "int32", "int8", "uint8")


def _ends(perm: Any, rank: int) -> tuple[int, int]:
    """(destination, source) of a rank in a permutation of all ranks."""
    return dict(perm)[rank], {dst: src for src, dst in perm}[rank]


class RawMpi:
    """mpi4py on NumPy arrays. The next call of the same size overwrites the result, as MPI programs reuse buffers."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self._last = np.empty(0, np.float32)

    def _result(self, x: np.ndarray, size: int) -> np.ndarray:
        if self._last.size != size or self._last.dtype != x.dtype:
            self._last = np.zeros(size, x.dtype)  # written, so that the timed calls have no page faults
        return self._last

    def psum(self, x: np.ndarray, axis: Any) -> np.ndarray:
        self._comm.Allreduce(x, y := self._result(x, x.size), self._mpi.SUM)
        return y

    def pmax(self, x: np.ndarray, axis: Any) -> np.ndarray:
        self._comm.Allreduce(x, y := self._result(x, x.size), self._mpi.MAX)
        return y

    def psum_scatter(self, x: np.ndarray, axis: Any, tiled: bool) -> np.ndarray:
        self._comm.Reduce_scatter_block(x, y := self._result(x, x.size // self._comm.size), self._mpi.SUM)
        return y

    def all_gather(self, x: np.ndarray, axis: Any, tiled: bool) -> np.ndarray:
        self._comm.Allgather(x, y := self._result(x, x.size * self._comm.size))
        return y

    def all_to_all(self, x: np.ndarray, axis: Any, split: int, concat: int, tiled: bool) -> np.ndarray:
        self._comm.Alltoall(x, y := self._result(x, x.size))
        return y

    def ppermute(self, x: np.ndarray, axis: Any, perm: Any) -> np.ndarray:
        to, source = _ends(perm, self._comm.rank)
        self._comm.Sendrecv(x, to, recvbuf=(y := self._result(x, x.size)), source=source)
        return y

    def pbroadcast(self, x: np.ndarray, axis: Any, root: int) -> np.ndarray:
        y = x if self._comm.rank == root else self._result(x, x.size)
        self._comm.Bcast(y, root)
        return y

    def barrier(self, x: np.ndarray, axis: Any) -> np.ndarray:
        self._comm.Barrier()
        return x


class Mpi4jax:
    """mpi4jax inside jit. shard_map rejects mpi4jax's effects on more than one device, so it is not used."""

    def __init__(self) -> None:
        import mpi4jax
        from mpi4py import MPI

        self._mpi4jax, self._mpi, self._comm = mpi4jax, MPI, MPI.COMM_WORLD

    def psum(self, x: Any, axis: Any) -> Any:
        return self._mpi4jax.allreduce(x, op=self._mpi.SUM, comm=self._comm)

    def pmax(self, x: Any, axis: Any) -> Any:
        return self._mpi4jax.allreduce(x, op=self._mpi.MAX, comm=self._comm)

    def all_gather(self, x: Any, axis: Any, tiled: bool) -> Any:
        return self._mpi4jax.allgather(x, comm=self._comm).reshape(-1)

    def all_to_all(self, x: Any, axis: Any, split: int, concat: int, tiled: bool) -> Any:
        return self._mpi4jax.alltoall(x.reshape(self._comm.size, -1), comm=self._comm).reshape(-1)

    def ppermute(self, x: Any, axis: Any, perm: Any) -> Any:
        to, source = _ends(perm, self._comm.rank)
        return self._mpi4jax.sendrecv(x, x, source, to, comm=self._comm)

    def pbroadcast(self, x: Any, axis: Any, root: int) -> Any:
        return self._mpi4jax.bcast(x, root, comm=self._comm)

    def barrier(self, x: Any, axis: Any) -> Any:
        self._mpi4jax.barrier(comm=self._comm)
        return x
