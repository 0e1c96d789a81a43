"""route_and_dispatch: places, rows and errors, against loops of NumPy and route()."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import OURS, assert_same, on_ranks, run
from oracle import ids_of
from test_routing import FIELDS, check

moe = OURS.moe


@pytest.mark.parametrize("kind", ["holes", "one rank"])
@pytest.mark.parametrize("options", [{"align": 3}, {"slots": 48}, {"capacity": 48}], ids=str)
def test_routing_and_payloads_of_several_types(line, rng, options, kind):
    ids = ids_of(kind, rng, 8, 3, 2, 16)
    x = {
        "narrow": rng.integers(0, 2, (8, 3, 7)).astype(bool),
        "none": np.zeros((8, 3, 0), np.float32),
        "small": rng.integers(-9, 9, (8, 3, 3)).astype(jnp.bfloat16),
        "wide": rng.standard_normal((8, 3, 2, 3)).astype(np.float32),
    }

    def body(ids, x):
        how = {"algorithm": "one_shot", "reduce": "home", **options}
        rows, r = moe.route_and_dispatch(x, ids, "gpu", num_experts=16, **how)
        assert (r.reduce, r.num_experts, r.capacity) == ("home", 16, jax.tree.leaves(rows)[0].shape[0])
        return {name: getattr(r, name) for name in FIELDS}, rows

    fields, rows = run(body, line, ids, x)
    check(fields, ids, 16, **options)
    slot, _, capacity = oracle.route(ids, 16, **options)
    assert_same(rows, {name: oracle.dispatch(v, ids, slot, capacity, 16) for name, v in x.items()}, bits=True)


def test_transfers_of_all_functions_and_derivatives_have_the_options_of_the_call(line):
    def body(ids, x):
        r = moe.route(ids, "gpu", num_experts=8)

        def f(x, **how):
            rows = [moe.dispatch_quantized(x, r, **how), moe.dispatch(x, r, **how)]
            for overflow in ("raise", "drop"):
                rows.append(moe.route_and_dispatch(x, ids, "gpu", num_experts=8, on_overflow=overflow, **how)[0])
            return [jnp.sum(moe.combine(y, r, jnp.ones((2, 1)), **how)) for y in rows]

        def total(x):
            return jnp.sum(jnp.stack(f(x, algorithm="direct", max_sms=3) + f(x, max_sms=3)))

        return jax.value_and_grad(total)(x), jax.jvp(total, (x,), (x,))

    args = jax.ShapeDtypeStruct((8, 2, 1), jnp.int32), jax.ShapeDtypeStruct((8, 2, 4), jnp.float32)
    text = jax.jit(on_ranks(body, line)).lower(*args).as_text()
    calls = re.findall(r"custom_call @jaxcomm_((?:dispatch|combine)\b.*)", text)
    assert all("max_sms = 3 " in call for call in calls)
    assert len(calls) == 2 * sum('algorithm = "direct"' in call for call in calls) >= 64
