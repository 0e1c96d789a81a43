"""By hand: an actor of Ray dies and starts again; its endpoint has the old name and a new incarnation."""

import contextlib
import os
import time

import numpy as np
import ray

from jaxcomm import transfer

SECRET = "a secret for this example"
LIMIT_S = 120


@ray.remote(max_restarts=1, max_task_retries=0)
class Trainer:
    def __init__(self):
        self.endpoint = transfer.Endpoint("trainer", secret=SECRET)
        transfer.publish(self.endpoint, "weights", {"x": np.full(4, os.getpid(), np.int64)}, 1)

    def address(self):
        return self.endpoint.address

    def die(self):
        os._exit(1)


def address_of(trainer):
    """Waits until Ray has started the actor."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return ray.get(trainer.address.remote(), timeout=LIMIT_S)
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
reader = transfer.Endpoint("reader", secret=SECRET)
trainer = Trainer.remote()
first = address_of(trainer)
old = transfer.fetch(reader, transfer.Group(first), "weights", 1, {"x": None}).result()["x"][0]
with contextlib.suppress(ray.exceptions.RayActorError):
    ray.get(trainer.die.remote())
try:
    transfer.fetch(reader, transfer.Group(first), "weights", 1, {"x": None}, timeout_s=10).result()
    raise AssertionError("the old address answers")
except transfer.PeerLost as error:
    print(f"old address: PeerLost: {error}")
second = address_of(trainer)
new = transfer.fetch(reader, transfer.Group(second), "weights", 1, {"x": None}).result()["x"][0]
(_, _, _, name, before, _), (_, _, _, same, after, _) = (address.split("/") for address in (first, second))
assert name == same and before != after and old != new
print(f"after the restart: endpoint {name!r}, incarnation {before} -> {after}, process {old} -> {new}")
reader.close()
ray.shutdown()
