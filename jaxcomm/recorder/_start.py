"""Starts the flight recorder of this process, removes old files, and writes stacks and dumps on triggers."""

import atexit
import contextlib
import faulthandler
import functools
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import threading
import time

import jax

from jaxcomm import _compat, _core
from jaxcomm._config import config
from jaxcomm._processes import bootstrap, kv_store
from jaxcomm.recorder import _file, _prometheus

STACKS, TRIGGER, DUMP_TRIGGER = ".ring.stacks", "trigger", "dump"
# In the default folder: files of processes that have ended are kept this long, and at most so many of them.
_KEPT_S, _KEPT_FILES = 24 * 3600, 256
_POLL_S = 0.5


def default_folder() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"jaxcomm-recorder-{os.getuid()}"


@functools.cache
def start() -> None:
    """Starts the recorder. A failure is a warning: the program works without it."""
    if (named := config().recorder) == "":
        return
    folder = default_folder() if named is None else pathlib.Path(named)
    joined = jax.distributed.is_initialized()  # then the back ends need not have started
    own = kv_store.process_id() if joined else jax.process_index()
    num_processes = kv_store.num_processes() if joined else jax.process_count()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if named is None:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise RuntimeError(f"{folder} belongs to another user; set JAXCOMM_RECORDER to a folder")
            _remove_old(folder)
        path = folder / f"process-{own}-{time.time_ns() // 1_000_000}-{os.getpid()}{_file.SUFFIX}"
        job = kv_store.coordinator_address() if num_processes > 1 else None
        _core.recorder.start(
            str(path.absolute()),
            config().recorder_calls,
            own,
            num_processes,
            importlib.metadata.version("jaxcomm"),
            bootstrap.kernel_id(),
            bootstrap.node_id(),
            job or f"pid {os.getpid()}",
        )
    except (OSError, RuntimeError) as error:
        print(f"warning: jaxcomm: {error}", file=sys.stderr)
        return
    threading.Thread(target=_watch, args=(path,), daemon=True, name="jaxcomm-recorder").start()
    atexit.register(_end, path, named is None)


def start_if_numbered() -> None:
    """Starts the recorder of a process without collectives, unless JAX may still give the process a number."""
    if jax.distributed.is_initialized() or _compat.back_ends_have_started():
        start()


def _remove_old(folder: pathlib.Path) -> None:
    files = sorted(folder.glob(f"process-*{_file.SUFFIX}*"), key=_time_of, reverse=True)
    for number, file in enumerate(files):
        if number >= _KEPT_FILES or time.time() - _time_of(file) > _KEPT_S:
            pid = file.name.partition(_file.SUFFIX)[0].rpartition("-")[2]
            if not os.path.exists(f"/proc/{pid}"):
                file.unlink(missing_ok=True)


def _time_of(file: pathlib.Path) -> float:
    """Start of the process, from the name."""
    try:
        return int(file.name.split("-")[2]) / 1000
    except (IndexError, ValueError):
        return 0.0


def _end(path: pathlib.Path, remove: bool) -> None:
    error = getattr(sys, "last_value", None)
    _core.recorder.set_ending(type(error).__name__ if error is not None else "exit")
    with contextlib.suppress(OSError):
        if remove and error is None and not path.with_name(path.name + ".dump").exists():
            for file in path.parent.glob(path.name + "*"):
                file.unlink(missing_ok=True)


def _watch(path: pathlib.Path) -> None:
    """Writes stacks and dumps whenever the triggers of the folder are touched, and the counters now and then."""
    trigger, stacks = path.with_name(TRIGGER), path.with_name(path.name + ".stacks")
    dump_trigger, dump = path.with_name(DUMP_TRIGGER), path.with_name(path.name + ".dump")
    seen, dump_seen, counters = touched(trigger), touched(dump_trigger), _prometheus.Writer(path)
    while True:
        time.sleep(_POLL_S)
        if (now := touched(trigger)) != seen:
            seen = now
            with contextlib.suppress(OSError):
                part = stacks.with_name(stacks.name + ".part")
                with open(part, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.writelines(f"{line}\n" for line in _prometheus.waiting_transfers())
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                part.replace(stacks)
        if (now := touched(dump_trigger)) != dump_seen:
            dump_seen = now
            with contextlib.suppress(RuntimeError):  # a full disk
                _core.recorder.dump(str(dump))
        counters.write_if_due()


def touched(trigger: pathlib.Path) -> int:
    try:
        return trigger.stat().st_mtime_ns
    except OSError:
        return 0
