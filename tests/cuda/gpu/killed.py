"""Kills one of the processes that share the GPU, between collectives: all others must get an error that names it.

    python killed.py <processes>

Prints one line of JSON; status 0 if each survivor got such an error, and in time. Each process runs the same file
again, with what python -m jaxcomm.run would put into its environment; that itself would end the survivors too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

TIMEOUT_S = 10  # processes start seconds apart
SLACK_S = 25  # for detection: without MPS, a spinning process occupies the GPU for a while
LIMIT_S = 600  # the caller may have a shorter one


def survive_or_die():
    import jax
    import numpy as np

    jax.config.update("jax_enable_recoverability", True)  # otherwise JAX ends the survivors
    from group import SIZE, on_ranks, put

    import jaxcomm

    f = on_ranks(lambda x: jaxcomm.psum(x, "i"))
    x = put(np.ones((SIZE, 1000), np.float32))
    for _ in range(3):
        jax.block_until_ready(f(x))
    if jax.process_index() == SIZE - 1:
        time.sleep(1)  # until all have completed the last one
        os.kill(os.getpid(), signal.SIGKILL)
    began, text = time.monotonic(), ""
    while not text and time.monotonic() - began < TIMEOUT_S + SLACK_S:
        time.sleep(0.2)
        try:
            jax.block_until_ready(f(x))
        except (RuntimeError, ValueError) as error:
            text = str(error)
    print(json.dumps({"error": text, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    os._exit(0)  # JAX would wait for the dead process


def problem_of(errors, size):
    """Describes wrong results of the survivors; empty if there are none."""
    for rank, error in enumerate(errors):
        if error is None:
            return f"rank {rank} printed nothing"
        if not error["error"]:
            return f"rank {rank} got no error within {error['seconds']} s"
        dead = rf"rank {size - 1} did not signal|process {size - 1}\b"  # on GPUs, on CPUs
        if "psum at " not in error["error"] or not re.search(dead, error["error"]):
            return f"rank {rank} got an error that does not name the op and the dead: {error['error']}"
    return ""


def main(size):
    from jaxcomm.run import free_port, rank_environment

    address = f"127.0.0.1:{free_port()}"
    base = {**os.environ, "JAXCOMM_TIMEOUT_S": str(TIMEOUT_S)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "rank"], stdout=subprocess.PIPE, text=True,
            env=rank_environment(base, rank, processes=size, devices=None, nodes=None, address=address),
        )
        for rank in range(size)
    ]  # fmt: skip
    end = time.monotonic() + LIMIT_S
    errors = []
    for process in processes[:-1]:
        try:
            said, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            said = ""
        lines = [line for line in said.splitlines() if line.startswith("{")]
        errors.append(json.loads(lines[-1]) if lines else None)
    for process in processes:
        process.kill()
        process.wait()
    problem = problem_of(errors, size)
    print(json.dumps({"problem": problem, "survivors": errors}))
    return 1 if problem else 0


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        survive_or_die()
    sys.exit(main(int(sys.argv[1])))
