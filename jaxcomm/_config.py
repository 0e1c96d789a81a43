"""Environment variables, read once."""

import dataclasses
import functools
import math
import os


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of this process.

    Attributes:
      timeout_s: seconds that a rank waits for others that live but are late, because they compile or write a
        checkpoint, before its call ends in an error (JAXCOMM_TIMEOUT_S).
      warn_s: seconds after which a line on standard error names the op and the missing ranks, and again each time that
        the wait has doubled (JAXCOMM_WARN_S). CPUs only.
      node_id: name of the node of this process, instead of what the kernel says (JAXCOMM_NODE_ID): processes share
        memory exactly if their names are equal. GPUs are of different nodes if their names differ.
      single_copy: whether processes of a node may read each other's memory (JAXCOMM_SINGLE_COPY, 0 or 1). If not, or if
        the kernel forbids it, large buffers are copied through shared memory.
      ucx_library: path of the libucp to use between nodes (JAXCOMM_UCX_LIBRARY), instead of the system's or the
        wheel's.
      network_devices: UCX's names of the interfaces to use and listen on (JAXCOMM_NETWORK_DEVICES), such as "eth0" or
        "mlx5_0:1", or "all". If not set: the one through which the coordinator is reached; all on machines with RDMA.
      max_sms: multiprocessors of a GPU that one collective may keep busy (JAXCOMM_MAX_SMS); the same in all processes.
      windows: whether GPUs read and write XLA's own buffers (JAXCOMM_WINDOWS, 0 or 1), from jax 0.12 on, instead of
        copies of them; the same in all processes. docs/guide/gpus.md says why it is off.
      algorithm: "xla" lowers every collective to XLA's own (JAXCOMM_ALGORITHM), whatever the calls ask for; the same in
        all processes.
      calibration: file that jaxcomm.calibrate() writes and later runs read (JAXCOMM_CALIBRATION), instead of
        jaxcomm/calibration-<host>.json in the user's cache folder; none if empty.
    """

    timeout_s: float = 600.0
    warn_s: float = 30.0
    node_id: str | None = None
    single_copy: bool = True
    ucx_library: str | None = None
    network_devices: str | None = None
    max_sms: int = 32
    windows: bool = False
    algorithm: str | None = None
    calibration: str | None = None


def _positive_float(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number of seconds, got {text!r}")
    return value


def _positive_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ValueError(f"{name} must be a positive integer, got {text!r}")
    return int(text)


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "1" if default else "0")
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _algorithm() -> str | None:
    text = os.environ.get("JAXCOMM_ALGORITHM") or None
    if text not in (None, "xla"):
        raise ValueError(f"JAXCOMM_ALGORITHM must be 'xla' or not set, got {text!r}")
    return text


@functools.cache
def config() -> Config:
    """The settings, from the environment at the first call."""
    return Config(
        timeout_s=_positive_float("JAXCOMM_TIMEOUT_S", Config.timeout_s),
        warn_s=_positive_float("JAXCOMM_WARN_S", Config.warn_s),
        node_id=os.environ.get("JAXCOMM_NODE_ID"),
        single_copy=_flag("JAXCOMM_SINGLE_COPY", Config.single_copy),
        ucx_library=os.environ.get("JAXCOMM_UCX_LIBRARY"),
        network_devices=os.environ.get("JAXCOMM_NETWORK_DEVICES"),
        max_sms=_positive_int("JAXCOMM_MAX_SMS", Config.max_sms),
        windows=_flag("JAXCOMM_WINDOWS", Config.windows),
        algorithm=_algorithm(),
        calibration=os.environ.get("JAXCOMM_CALIBRATION"),
    )
