"""Settings, read once from environment variables. docs/configuration.md has their table."""

import dataclasses
import difflib
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

# Variables of the build and of tests: no settings of the library.
_OF_TOOLS = ("JAXCOMM_BENCHMARK_", "JAXCOMM_CUDA", "JAXCOMM_TEST_")
ALL, EACH = "all processes alike", "each process alone"
LONGEST_S = 1e9  # limits of threads and of the operating system overflow not far above


def _text(name: str, text: str) -> str:
    return text


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_S:
        raise ValueError(f"{name} must be a positive number of seconds up to {LONGEST_S:g}, got {text!r}")
    return value


def _positive_int(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ValueError(f"{name} must be a positive integer, got {text!r}")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _algorithm(name: str, text: str) -> str | None:
    if text not in ("", "xla", "plans"):
        raise ValueError(f"{name} must be 'xla', 'plans', empty or not set, got {text!r}")
    return text or None


def _setting(name: str, default: Any, parse: Callable[[str, str], Any], who: str, meaning: str) -> Any:
    """Returns a field of Config.

    Args:
      name: name of the environment variable.
      default: value if the variable is not set.
      parse: (name, text) -> value; raises ValueError.
      who: ALL if all processes of a program must have the same value, else EACH.
      meaning: description for users, in Markdown.
    """
    metadata = {"name": name, "parse": parse, "who": who, "meaning": meaning}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of this process."""

    timeout_s: float = _setting(
        "JAXCOMM_TIMEOUT_S", 600.0, _seconds, EACH,
        "Seconds that a rank waits for a late rank before its call ends in an error. A rank is late while it compiles "
        "or writes a checkpoint. A dead rank is detected sooner.",
    )  # fmt: skip
    warn_s: float = _setting(
        "JAXCOMM_WARN_S", 30.0, _seconds, EACH,
        "Seconds after which a line on standard error names the op and the missing ranks. The line is repeated each "
        "time the wait has doubled. Processes whose calls differ get an error after as many seconds. CPUs only.",
    )  # fmt: skip
    node_id: str | None = _setting(
        "JAXCOMM_NODE_ID", None, _text, EACH,
        "Name of the node of this process. Processes share memory exactly if their names are equal. GPUs are on "
        "different nodes if their names differ. By default, the name consists of the kernel's boot id, the namespaces "
        "and the user.",
    )  # fmt: skip
    single_copy: bool = _setting(
        "JAXCOMM_SINGLE_COPY", True, _flag, EACH,
        "1: processes of a node read each other's memory where the kernel allows it. 0: they copy large buffers "
        "through shared memory.",
    )  # fmt: skip
    ucx_library: str | None = _setting(
        "JAXCOMM_UCX_LIBRARY", None, _text, EACH,
        "Path of the libucp to use between nodes, instead of the library of the system or of the libucx wheel.",
    )  # fmt: skip
    network_devices: str | None = _setting(
        "JAXCOMM_NETWORK_DEVICES", None, _text, EACH,
        "UCX's names of the network interfaces to use and listen on, such as `eth0` or `mlx5_0:1`, or `all`. The "
        "default is the interface that reaches the coordinator; on machines with RDMA it is `all`.",
    )  # fmt: skip
    max_sms: int = _setting(
        "JAXCOMM_MAX_SMS", 32, _positive_int, ALL,
        "Multiprocessors of a GPU that one collective may occupy. The keyword `max_sms` of an op can lower the limit. "
        "Up to 40 multiprocessors of the smallest GPU of a group stay free in any case.",
    )  # fmt: skip
    symmetric_buffers: bool = _setting(
        "JAXCOMM_SYMMETRIC_BUFFERS", False, _flag, ALL,
        "1: GPUs read and write XLA's own buffers instead of copies. Needs jax 0.12.",
    )  # fmt: skip
    bulk_copy: bool = _setting(
        "JAXCOMM_BULK_COPY", False, _flag, EACH,
        "1: kernels on GPUs of compute capability 9.0 or later copy long blocks by bulk copies (TMA). Experimental.",
    )  # fmt: skip
    algorithm: str | None = _setting(
        "JAXCOMM_ALGORITHM", None, _algorithm, ALL,
        "`xla`: every collective becomes XLA's own, also in calls with `algorithm=`. `plans`: jaxcomm's own "
        "collectives on GPUs even if `python -m jaxcomm.selftest` has not passed there. It does not select the kernels "
        "of `moe.dispatch` and `moe.combine` between hosts.",
    )  # fmt: skip
    calibration: str | None = _setting(
        "JAXCOMM_CALIBRATION", None, _text, EACH,
        "File that `jaxcomm.calibrate()` writes and later programs read; empty for no file. The default is "
        "`jaxcomm/calibration-<host>.json` in the user's cache folder. All processes of a program use the content that "
        "the first of them has read.",
    )  # fmt: skip
    recorder: str | None = _setting(
        "JAXCOMM_RECORDER", None, _text, EACH,
        "Folder of the [flight recorder](guide/observing.md); empty: nothing is recorded. The default is "
        "`jaxcomm-recorder-<user id>` in the folder for temporary files (`TMPDIR`), which every host has for itself: a "
        "file on a network could stop a store of the recorder. Processes leave no file there after a normal end.",
    )  # fmt: skip
    recorder_calls: int = _setting(
        "JAXCOMM_RECORDER_CALLS", 4096, _positive_int, EACH,
        "Latest calls that the flight recorder keeps, of 128 bytes each, beside 0.5 MB for names.",
    )  # fmt: skip


@functools.cache
def config() -> Config:
    """The settings. The first call reads them from the environment, and warns of unknown variables."""
    values = {}
    for field in dataclasses.fields(Config):
        name, parse = field.metadata["name"], field.metadata["parse"]
        if (text := os.environ.get(name)) is not None:
            values[field.name] = parse(name, text)
    _warn_of_unknown({field.metadata["name"] for field in dataclasses.fields(Config)})
    return Config(**values)


def _warn_of_unknown(known: set[str]) -> None:
    for name in sorted(os.environ):
        if name.startswith("JAXCOMM_") and name not in known and not name.startswith(_OF_TOOLS):
            nearest = difflib.get_close_matches(name, known, 1, cutoff=0.8)
            remedy = f"did you mean {nearest[0]}?" if nearest else "docs/configuration.md lists the settings"
            print(f"warning: jaxcomm: the environment variable {name} is unknown: {remedy}", file=sys.stderr)


def set_default(name: str, text: str) -> None:
    """Sets an environment variable if it is not set. Comes before the first call of config()."""
    os.environ.setdefault(name, text)


def cache_folder() -> pathlib.Path | None:
    """jaxcomm's folder in the user's cache; None if the user has no home folder."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        return None
    return pathlib.Path(cache) / "jaxcomm"


def write(file: pathlib.Path, text: str) -> None:
    """Writes a file of the cache. Readers see the old or the new file. Raises OSError if it can't be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)


def table() -> str:
    """The settings as a table in Markdown."""
    rows = []
    for field in dataclasses.fields(Config):
        value: Any = field.default
        default = "not set" if value is None else f"{int(value)}"  # flags and whole numbers
        rows.append(
            f"| `{field.metadata['name']}` | {default} | {field.metadata['who']} | {field.metadata['meaning']} |"
        )
    return "\n".join(["| variable | default | must agree | meaning |", "|---|---|---|---|", *rows])
