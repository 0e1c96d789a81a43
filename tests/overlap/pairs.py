"""The ops that can be started, each in three ways: start and done, synchronous, jax.lax."""

import types

from harness import OURS

# Arguments on a block of shape BLOCK, over axes of up to 8 ranks.
ARGUMENTS = {
    "psum": ((), {}),
    "all_gather": ((), {"axis": 1}),
    "psum_scatter": ((), {"scatter_dimension": 1, "tiled": True}),
    "all_to_all": ((0, 1), {"tiled": True}),
    "ppermute": (([(0, 1), (1, 2), (3, 0)],), {}),
    "pbroadcast": ((1,), {}),
}
OPS = tuple(ARGUMENTS)
BLOCK = (8, 16)


def _started(op):
    def call(x, axes, *args, start_after=(), done_after=(), **kwargs):
        pending = getattr(OURS, f"{op}_start")(x, axes, *args, after=start_after, **kwargs)
        return pending.done(after=done_after)

    return call


STARTED = types.SimpleNamespace(**{op: _started(op) for op in OPS})


def call(library, op, x, axes="gpu", **more):
    args, kwargs = ARGUMENTS[op]
    return getattr(library, op)(x, axes, *args, **kwargs, **more)
