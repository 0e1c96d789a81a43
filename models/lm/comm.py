"""The collectives of a script: those of jaxcomm, or of jax.lax under the same names."""

import functools
import types
from typing import Any, NamedTuple

import jax

SUMS = ("psum", "psum_start", "psum_scatter", "psum_scatter_start")
STARTS = ("psum", "all_gather", "psum_scatter", "ppermute")


class Ended(NamedTuple):
    """Stands for jaxcomm.Pending where the transfer is a synchronous operation."""

    result: Any

    def done(self, after=()):
        return self.result


def with_synchronous_starts(comm):
    """The same collectives, but a start is the synchronous operation, and ``after`` has no effect."""

    def start(name):
        return lambda *args, after=(), **kwargs: Ended(getattr(comm, name)(*args, **kwargs))

    return types.SimpleNamespace(**vars(comm) | {f"{name}_start": start(name) for name in STARTS})


def with_plain_products(comm):
    """The same collectives, and collective matmul as a collective and a product."""

    def all_gather_matmul(x, weights, axis_name, *, axis):
        gathered = comm.all_gather(x, axis_name, axis=axis, tiled=True)
        return tuple(gathered @ w for w in weights)

    def matmul_psum_scatter(x, w, axis_name, *, scatter_dimension):
        return comm.psum_scatter(x @ w, axis_name, scatter_dimension=scatter_dimension, tiled=True)

    products = {"all_gather_matmul": all_gather_matmul, "matmul_psum_scatter": matmul_psum_scatter}
    return types.SimpleNamespace(**vars(comm) | products)


def load(config, sums=("psum", "psum_scatter"), between_nodes=None):
    """Returns an object with the collectives that scripts use. Imports jaxcomm only when it is chosen.

    Args:
      config: options; --comm, --psum and --matmul are read.
      sums: the sums over ranks that the script uses; all of them must have the algorithm --psum.
      between_nodes: algorithm in place of --psum direct on several nodes of equally many ranks, which can't read each
        other's memory; None leaves the choice to jaxcomm. Nodes of different sizes also leave it to jaxcomm.
    """
    if config.comm == "lax":
        names = ("psum", "pmax", "psum_scatter", "all_gather", "all_to_all", "ppermute")
        comm = types.SimpleNamespace(reshard=jax.device_put, **{name: getattr(jax.lax, name) for name in names})
        return with_synchronous_starts(with_plain_products(comm))
    try:
        import jaxcomm
    except ImportError as error:
        raise ImportError(f"--comm jaxcomm: {error}. Install it with `make setup`, or use --comm lax.") from error
    common = [name for name in jaxcomm.algorithms("psum") if all(name in jaxcomm.algorithms(op) for op in sums)]
    if config.psum not in ("", *common):
        raise ValueError(f"--psum: got {config.psum!r}, expected one of {('', *common)}")
    algorithm = config.psum or None
    ranks = jaxcomm.topology().ranks
    if algorithm == "direct" and len(ranks) > 1:
        algorithm = between_nodes if len(set(ranks)) == 1 and ranks[0] > 1 else None
    matmul = getattr(config, "matmul", "") or None
    return types.SimpleNamespace(
        moe=jaxcomm.moe,
        reshard=jaxcomm.reshard,
        **{name: functools.partial(getattr(jaxcomm, name), algorithm=algorithm) for name in SUMS},
        pmax=jaxcomm.pmax,
        all_gather=jaxcomm.all_gather,
        all_gather_start=jaxcomm.all_gather_start,
        all_to_all=jaxcomm.all_to_all,
        ppermute=jaxcomm.ppermute,
        ppermute_start=jaxcomm.ppermute_start,
        all_gather_matmul=functools.partial(jaxcomm.all_gather_matmul, algorithm=matmul),
        matmul_psum_scatter=functools.partial(jaxcomm.matmul_psum_scatter, algorithm=matmul),
    )
