"""By hand: arrays that fetch() returns are PyTorch tensors without a copy, and donation leaves the tensor as it is."""

import jax
import numpy as np
import torch

from jaxcomm import transfer

values = np.arange(1024, dtype=np.float32)
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
with (
    transfer.Endpoint("a", secret="a secret for this example") as a,
    transfer.Endpoint("b", secret="a secret for this example") as b,
):
    transfer.publish(a, "weights", {"x": values, "y": values}, 1)
    fetched = transfer.fetch(b, transfer.Group(a.address), "weights", 1, {"x": None, "y": device}).result()
tensors = {"x": torch.from_numpy(fetched["x"]), "y": torch.from_dlpack(fetched["y"])}
addresses = {"x": fetched["x"].ctypes.data, "y": fetched["y"].unsafe_buffer_pointer()}
for name, tensor in tensors.items():
    assert tensor.data_ptr() == addresses[name], f"{name} was copied"
changed = jax.jit(lambda y: y + 1, donate_argnums=0)(fetched["y"])
np.testing.assert_array_equal(changed, values + 1)
for tensor in tensors.values():
    np.testing.assert_array_equal(tensor.numpy(), values)
print(f"PyTorch {torch.__version__}: NumPy and JAX arrays shared, tensor unchanged by donation")
