"""Rows of `validate-here` on two hosts: network namespaces of this machine, connected by shaped links. Needs root.

python benchmarks/here_hosts.py --out rows.csv
python -m jaxcomm.simulate validate-here --rows rows.csv
"""

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "hosts"))
import netns

_PORT = 23456
HOSTS, PROCESSES, DEVICES = 2, 2, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="hosts.csv", help="where to write the rows (default: hosts.csv)")
    parser.add_argument("--rounds", default="5", help="default: 5")
    parser.add_argument(
        "--sizes", default="512,4096,32768,262144,2097152", help="bytes of the larger of operand, result"
    )
    parser.add_argument("--lengths", default="4,2", help="ops of a chain, of short and of long operands (default: 4,2)")
    parser.add_argument("--gbit-per-s", type=float, default=1.0, help="rate of each host's link (default: 1)")
    parser.add_argument("--delay-us", type=float, default=200.0, help="one-way delay (default: 200)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="limit of the measurement (default: 1800)")
    args = parser.parse_args()
    if reason := netns.why_not():
        print(f"here_hosts.py: {reason}", file=sys.stderr)
        return 2
    name = f"{HOSTS} hosts x {PROCESSES} x {DEVICES}"
    rate = args.gbit_per_s * 1e9
    with netns.Hosts(HOSTS, rate_bits_per_s=rate, delay_s=args.delay_us * 1e-6) as hosts:
        started = []
        for number in range(HOSTS * PROCESSES):
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(DEVICES),
                "JAX_COORDINATOR_ADDRESS": f"{hosts.address(0)}:{_PORT}",
                "JAX_NUM_PROCESSES": str(HOSTS * PROCESSES),
                "JAX_PROCESS_ID": str(number),
                "JAXCOMM_NETWORK_DEVICES": "eth0",
                "JAXCOMM_CALIBRATION": "",
            }
            command = [sys.executable, "-m", "jaxcomm.simulate.here_rows", "--out", args.out, "--name", name]
            command += ["--rounds", args.rounds, "--sizes", args.sizes, "--lengths", args.lengths]
            started.append(hosts.start(number // PROCESSES, command, env=environment))
        codes = [process.wait(args.timeout_s) for process in started]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
