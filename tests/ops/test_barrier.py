"""barrier. Beyond the contract: it waits for all ranks, orders its operands, and accepts any operands."""

import time

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OURS, assert_same, on_ranks, run, share
from jax import lax
from jax.experimental import io_callback


class TestBarrier(contract.Contract):
    op = "barrier"

    @pytest.mark.parametrize("algorithm", OURS.algorithms("barrier"))
    def test_no_rank_leaves_before_all_have_entered(self, mesh, algorithm):
        entered, left = {}, {}

        def enter(rank, step):
            time.sleep(0.002 * ((int(rank) * 5 + int(step)) % 8))
            entered[int(rank), int(step)] = time.monotonic()
            return np.int32(step)

        def leave(rank, step):
            left[int(rank), int(step)] = time.monotonic()
            return np.int32(step)

        def body(x):
            rank = lax.axis_index(("node", "gpu"))
            for _ in range(4):
                x = io_callback(enter, jax.ShapeDtypeStruct((), np.int32), rank, x)
                x = OURS.barrier(x, ("node", "gpu"), algorithm=algorithm)
                x = io_callback(leave, jax.ShapeDtypeStruct((), np.int32), rank, x) + 1
            return x

        assert_same(run(body, mesh, np.zeros(8, np.int32), check_vma=False), np.full(8, 4, np.int32))
        # The clock is that of the machine, so that times of several processes can be compared.
        entered, left = ({k: t for part in parts for k, t in part.items()} for parts in (share(entered), share(left)))
        for step in range(4):
            assert max(entered[r, step] for r in range(8)) <= min(left[r, step] for r in range(8))

    def test_gradient_does_not_wait(self, mesh, rng):
        x = self.integers(rng)
        text = jax.jit(on_ranks(jax.grad(lambda x: jnp.sum(OURS.barrier(x, "gpu"))), mesh)).lower(x).as_text()
        assert text.count("@jaxcomm_barrier(") <= 1

    def test_that_of_xla_waits_for_all_operands_and_for_its_group_alone(self, mesh):
        f = on_ranks(lambda *xs: OURS.barrier(xs, "gpu", axis_index_groups=[[0, 2], [1, 3]], algorithm="xla"), mesh)
        text = jax.jit(f).lower(*[np.ones((8, 3), np.float32)] * 2).as_text()
        before, after = text.split('"stablehlo.all_reduce"')
        assert before.count("compare NE") == 2 and "dense<[[0, 2], [1, 3], [4, 6], [5, 7]]>" in after

    def test_results_elsewhere_are_refused(self, mesh, monkeypatch):
        """They would have arbitrary contents."""
        call = jax.ffi.ffi_call
        monkeypatch.setattr(jax.ffi, "ffi_call", lambda *args, input_output_aliases, **more: call(*args, **more))
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: jaxcomm: barrier: results must be"):
            run(lambda x: OURS.barrier(x, "gpu"), mesh, np.zeros((8, 3)))
