"""A job of test_slurm.py, a trainer or a generator. A folder that both see has the secret and the trainer's address."""

import os
import pathlib
import socket
import sys
import time

import numpy as np

from jaxcomm import transfer

role, folder = sys.argv[1], pathlib.Path(sys.argv[2])
own_address = socket.gethostbyname(socket.gethostname())
endpoint = transfer.Endpoint(role, secret=(folder / "secret").read_bytes(), listen=f"{own_address}:0")

if role == "trainer":
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    transfer.publish(endpoint, "weights", {"x": np.full(1000, restarts, np.int32)}, 1)
    (folder / "new").write_text(endpoint.address)
    (folder / "new").rename(folder / "address")
    time.sleep(3600)

got = None
while not (folder / "address").exists():
    time.sleep(0.1)
while got != int(sys.argv[3]):
    try:
        at = (folder / "address").read_text()
        weights = transfer.fetch(endpoint, transfer.Group(at), "weights", "latest", None, timeout_s=5).result()
        if got != weights["['x']"][0]:
            got = weights["['x']"][0]
            assert weights["['x']"].sum() == 1000 * got
            print(f"weights of trainer after {got} restarts, on {socket.gethostname()}", flush=True)
    except transfer.TransferError as error:
        print(type(error).__name__, error, flush=True)
    time.sleep(0.2)
