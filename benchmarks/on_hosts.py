"""Runs a benchmark on hosts of network namespaces, with one process on each."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
IS_HOST = "JAXCOMM_BENCHMARK_HOST"


def is_host():
    """Whether run() has started this process."""
    return IS_HOST in os.environ


def run(num_hosts, rate_bits_per_s, delay_s):
    """Runs this program on every host. Returns the exit status; shows the output of the first host."""
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    import netns

    if netns.why_not():
        sys.exit(f"--hosts: {netns.why_not()}")
    with netns.Hosts(num_hosts, rate_bits_per_s=rate_bits_per_s, delay_s=delay_s) as hosts:
        processes = []
        for host in range(num_hosts):
            environment = {
                **os.environ,
                "JAX_COORDINATOR_ADDRESS": f"{hosts.address(0)}:23456",
                "JAX_NUM_PROCESSES": str(num_hosts),
                "JAX_PROCESS_ID": str(host),
                "JAXCOMM_NETWORK_DEVICES": "eth0",
                IS_HOST: "1",
            }
            output = None if host == 0 else subprocess.DEVNULL
            processes.append(hosts.start(host, [sys.executable, *sys.argv], env=environment, stdout=output))
        return max(process.wait() for process in processes)


def link_bytes():
    """Bytes received and sent by this host, as the kernel counts them."""
    with open("/proc/self/net/dev") as lines:
        words = next(line.split() for line in lines if line.split()[0] == "eth0:")
    return int(words[1]), int(words[9])
