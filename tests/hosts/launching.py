"""Starts a training script on 2 hosts x 2 processes."""

import subprocess
import sys

import training


def train_on(hosts, folder, script, *arguments, limit_s):
    """Runs a script, such as models.moe.train, in two processes of each host. Hosts share files only."""
    training.folder_to_start_in(folder)
    processes, outputs = [], []
    for rank in range(4):
        environment = {
            **training.environment(),
            "JAX_COORDINATOR_ADDRESS": f"{hosts.address(0)}:23456",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": str(rank),
            "JAXCOMM_NETWORK_DEVICES": "eth0",
        }
        outputs.append(folder / f"output {rank}")
        with open(outputs[-1], "w") as output:
            command = [sys.executable, "-m", script, *arguments]
            processes.append(
                hosts.start(rank // 2, command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    statuses = [process.wait(limit_s) for process in processes]
    assert statuses == [0] * 4, "\n".join(output.read_text()[-3000:] for output in outputs)
