"""The collectives of a script: those of jaxcomm, or of jax.lax under the same names."""

import functools
import types

import jax


def load(config):
    """Returns an object with the collectives that scripts use. Imports jaxcomm only when it is chosen."""
    if config.comm == "lax":
        return types.SimpleNamespace(
            **{name: getattr(jax.lax, name) for name in ("psum", "pmax", "psum_scatter", "all_gather", "all_to_all")},
            ppermute=jax.lax.ppermute,
            all_gather_matmul=all_gather_matmul,
            matmul_psum_scatter=matmul_psum_scatter,
        )
    jaxcomm = import_jaxcomm()
    both = [name for name in jaxcomm.algorithms("psum_scatter") if name in jaxcomm.algorithms("psum")]
    algorithm = algorithm_of_sums(config, both)
    if algorithm == "direct" and len(jaxcomm.topology().ranks) > 1:
        algorithm = None  # nodes can't read each other's memory
    sums = {name: functools.partial(getattr(jaxcomm, name), algorithm=algorithm) for name in ("psum", "psum_scatter")}
    matmul = getattr(config, "matmul", "") or None
    return types.SimpleNamespace(
        **sums,
        moe=jaxcomm.moe,
        pmax=jaxcomm.pmax,
        all_gather=jaxcomm.all_gather,
        all_to_all=jaxcomm.all_to_all,
        ppermute=jaxcomm.ppermute,
        all_gather_matmul=functools.partial(jaxcomm.all_gather_matmul, algorithm=matmul),
        matmul_psum_scatter=functools.partial(jaxcomm.matmul_psum_scatter, algorithm=matmul),
    )


def import_jaxcomm():
    try:
        import jaxcomm
    except ImportError as error:
        raise ImportError(f"--comm jaxcomm: {error}. Install it with `make setup`, or use --comm lax.") from error
    return jaxcomm


def algorithm_of_sums(config, algorithms):
    """The algorithm of --psum, one of ``algorithms``; None leaves the choice to jaxcomm."""
    known = ("", *algorithms)
    if config.psum not in known:
        raise ValueError(f"--psum: got {config.psum!r}, expected one of {known}")
    return config.psum or None


def all_gather_matmul(x, weights, axis_name, *, axis):
    """jaxcomm.all_gather_matmul with jax.lax, for a tuple of weights."""
    gathered = jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)
    return tuple(gathered @ w for w in weights)


def matmul_psum_scatter(x, w, axis_name, *, scatter_dimension):
    """jaxcomm.matmul_psum_scatter with jax.lax."""
    return jax.lax.psum_scatter(x @ w, axis_name, scatter_dimension=scatter_dimension, tiled=True)
