"""Links of the GPUs and RDMA devices of this host, as nvidia-smi and Linux report them. No function raises."""

import pathlib
import re
import subprocess

_LIMIT_S = 20  # nvidia-smi takes seconds on a machine with many GPUs, and may hang beside a broken driver
INFINIBAND = pathlib.Path("/sys/class/infiniband")


def nvlink() -> tuple[str, ...]:
    """The matrix of links that `nvidia-smi topo -m` prints, by line, or the reason why there is none."""
    command = ("nvidia-smi", "topo", "-m")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        return ("there is no nvidia-smi",)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (f"{' '.join(command)}: {error}",)
    if done.returncode != 0:
        return (f"{' '.join(command)}: {(done.stdout + done.stderr).strip() or f'status {done.returncode}'}",)
    return tuple(re.sub(r"\x1b\[\d*m", "", done.stdout).strip("\n").splitlines())


def nics() -> tuple[str, ...]:
    """Ports of RDMA devices: name, driver, state, rate, kind of link."""

    def read(path: pathlib.Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return "?"

    found = []
    try:
        for device in sorted(INFINIBAND.iterdir()):
            kind = (device / "device" / "driver").resolve().name
            for port in sorted((device / "ports").iterdir()):
                state, rate, layer = (read(port / name) for name in ("state", "rate", "link_layer"))
                found.append(f"{device.name} port {port.name}: {kind}, {state.rpartition(' ')[2]}, {rate}, {layer}")
    except OSError:
        pass  # no such folder, or a device that was just removed
    return tuple(found)
