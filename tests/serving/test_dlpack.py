"""docs/guide/interoperation.md: what other libraries do with arrays that jaxcomm has moved."""

import jax
import numpy as np

from jaxcomm import transfer


def test_views_of_fetched_arrays_share_memory_and_survive_donation():
    values = np.arange(1024, dtype=np.float32)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with (
        transfer.Endpoint("a", secret="the least secret") as a,
        transfer.Endpoint("b", secret=b"the least secret") as b,
    ):
        transfer.publish(a, "weights", {"x": values, "y": values}, 1)
        fetched = transfer.fetch(b, transfer.Group(a.address), "weights", 1, {"x": None, "y": device}).result()
    assert isinstance(fetched["x"], np.ndarray)
    view = np.from_dlpack(fetched["y"])
    assert view.ctypes.data == fetched["y"].unsafe_buffer_pointer()
    changed = jax.jit(lambda y: y + 1, donate_argnums=0)(fetched["y"])
    np.testing.assert_array_equal(changed, values + 1)
    np.testing.assert_array_equal(view, values)
