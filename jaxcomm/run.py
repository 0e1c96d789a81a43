"""Starts a script in several processes on this machine, for development and tests: python -m jaxcomm.run --help.

Nothing here knows the collectives, and nothing runs in the ranks but the script: what they need to find each other is
in their environment. docs/guide/clusters.md has the launchers for several machines.
"""

import argparse
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

TIMED_OUT = 124  # what timeout(1) returns
LONGEST_LINE_BYTES = 1 << 20  # longer ones are cut, so that a rank can't fill this process's memory

# Leads the process group of the ranks, and so keeps its number from being reused. It ends them, their children and
# itself when this process is gone, however that came about: then its input ends.
GUARD = "trap '' HUP INT TERM; echo ready; read -r _; kill -KILL 0"

# (rank, its return code), or (None, a signal) for this process
Events = queue.SimpleQueue[tuple[int | None, int]]

_output = threading.Lock()  # held while a line is written


def _write(fd: int, line: bytes, limit_s: float = -1) -> None:
    """Writes a line, unless other lines are in the way for longer than the limit; -1 is none."""
    if _output.acquire(timeout=limit_s):
        try:
            while line:
                line = line[os.write(fd, line) :]
        finally:
            _output.release()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        _write(2, f"jaxcomm.run: {text}\n".encode(), limit_s=1)  # a reader who pauses must not keep ranks alive


def rank_environment(
    base: Mapping[str, str], rank: int, *, processes: int, devices: int | None, nodes: int | None, address: str
) -> dict[str, str]:
    """The environment of one rank, in which ``jaxcomm.distributed.initialize()`` needs no arguments.

    Nor does ``jax.distributed.initialize()``: JAX reads the coordinator's address, but has no variables of its own for
    rank and number of processes (0.10.2 to 0.12). It detects Open MPI 4 first, by the three OMPI variables below.
    """
    ours = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX would listen to the whole network
        "JAX_NUM_PROCESSES": str(processes),  # these two are for jaxcomm
        "JAX_PROCESS_ID": str(rank),
        "OMPI_MCA_orte_hnp_uri": "0.0;none",  # makes JAX look; what it says is not used, as there is an address
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(rank),
    }
    if devices is not None:
        ours["JAX_NUM_CPU_DEVICES"] = str(devices)
    if nodes is not None:
        ours["JAXCOMM_NODE_ID"] = str(rank * nodes // processes)
    local = range(rank * (devices or 1), (rank + 1) * (devices or 1))
    defaults = {
        "JAX_PLATFORMS": "cpu",
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local)),  # of accelerators; no part in counting CPU devices
        "JAX_ENABLE_PREEMPTION_SERVICE": "0",  # it would catch the SIGTERM that is to end the ranks
        "PYTHONUNBUFFERED": "1",  # lines appear when they are printed
    }
    environment = defaults | dict(base) | ours
    for name in ("OMPI_VERSION", "OMPI_COMM_WORLD_LOCAL_RANK"):  # by which jax 0.12 would take this for Open MPI 5
        environment.pop(name, None)
    return environment


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """The number of a new process group; whatever is in it afterwards is killed."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )  # fmt: skip
    assert guard.stdin and guard.stdout
    with guard.stdin, guard.stdout:
        guard.stdout.readline()  # from here on the signals for the ranks don't end the guard
        try:
            yield guard.pid
        finally:
            os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()


def _relay(pipe: IO[bytes], fd: int, prefix: bytes, events: Events) -> None:
    """Copies a pipe to ``fd`` by whole lines, each behind ``prefix``. An unfinished last line is ended."""
    open_ = True
    while line := pipe.readline(LONGEST_LINE_BYTES):
        if open_:
            try:
                _write(fd, prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
            except OSError:  # our reader has gone; go on reading, so that the rank can end in its own way
                open_ = False
                events.put((None, signal.SIGPIPE))


def _start(
    rank: int, command: Sequence[str], environment: Mapping[str, str], group: int, events: Events
) -> list[threading.Thread]:
    """Starts a rank in the group. Returns the threads that relay its output."""
    process = subprocess.Popen(
        command, env=environment, process_group=group, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    relays = [
        threading.Thread(target=_relay, args=(pipe, fd, b"[%d] " % rank, events), daemon=True)
        for fd, pipe in ((1, process.stdout), (2, process.stderr))
    ]

    def wait() -> None:
        code = process.wait()
        for relay in relays:
            relay.join(0.2)  # last words before the verdict; but a child of the rank may keep the pipe open
        events.put((rank, code))

    for thread in (*relays, threading.Thread(target=wait, daemon=True)):
        thread.start()
    return relays


def _named(code: int) -> tuple[str, int]:
    """How a rank ended, in words and as an exit status of ours."""
    if code > 0:
        return f"exit code {code}", code
    try:
        return signal.Signals(-code).name, 128 - code
    except ValueError:  # signals without a name
        return f"signal {-code}", 128 - code


def _supervise(group: int, processes: int, events: Events, *, timeout_s: float | None, grace_s: float) -> int:
    """Waits for all ranks; the first failure, a signal or the time limit ends the others. Returns the exit status.

    Ranks that are left when this returns have outstayed the grace period, or someone insists: kill them.
    """
    running = set(range(processes))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    status = 0  # anything else: the ranks have been told to end, within the grace period

    def end(reason: str, exit_status: int, signum: int = signal.SIGTERM) -> None:
        nonlocal status, deadline
        status, deadline = exit_status, time.monotonic() + grace_s
        _say(reason)
        os.killpg(group, signum)

    def left() -> str:
        return "rank " + ", ".join(map(str, sorted(running)))

    while running:
        try:
            rank, code = events.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except queue.Empty:
            if status:
                _say(f"killed after {grace_s:g} s of grace: {left()}")
                break
            end(f"--timeout {timeout_s:g} reached by {left()}", TIMED_OUT)
            continue
        if rank is not None:
            running.discard(rank)
            if code and not status:
                how, exit_status = _named(code)
                end(f"rank {rank} failed: {how}", exit_status)
        elif status:  # a second Ctrl-C
            _say(f"killed: {left()}")
            break
        else:
            how, exit_status = _named(-code)
            end(f"got {how}", exit_status, signal.SIGTERM if code == signal.SIGPIPE else code)
    return status


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < threading.TIMEOUT_MAX:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse: "invalid positive int value"
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.run",
        usage="%(prog)s -n PROCESSES [options] (script.py | -m module) [arguments]",
        description="Starts a script in several processes on this machine. In each, "
        "jaxcomm.distributed.initialize() needs no arguments. The first failure ends all; its exit code is returned.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--processes", type=_positive(int), required=True)
    parser.add_argument("--devices", type=_positive(int), help="CPU devices per process")
    parser.add_argument(
        "--nodes", type=_positive(int), help="pretend that the processes are on so many nodes (JAXCOMM_NODE_ID)"
    )
    parser.add_argument("--timeout", type=_positive(float), metavar="SECONDS", help="end everything after this time")
    parser.add_argument(
        "--grace", type=_positive(float), default=5.0, metavar="SECONDS",
        help="from SIGTERM to SIGKILL when processes are ended (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="...", help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher. Returns the exit status: 0, or that of the first rank to fail (128 + n for signal n)."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not (args.module or args.script):
        parser.error("expected a script, or -m and a module")
    if args.nodes and args.processes % args.nodes:
        parser.error(f"--nodes: {args.processes} processes can't be split evenly among {args.nodes} nodes")
    command = [sys.executable, *(["-m", *args.module] if args.module else args.script)]
    address = f"127.0.0.1:{free_port()}"
    events: Events = queue.SimpleQueue()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, lambda signum, frame: events.put((None, signum)))
    relays: list[threading.Thread] = []
    with _process_group() as group:
        for rank in range(args.processes):
            environment = rank_environment(
                os.environ, rank, processes=args.processes, devices=args.devices, nodes=args.nodes, address=address
            )
            relays += _start(rank, command, environment, group, events)
        status = _supervise(group, args.processes, events, timeout_s=args.timeout, grace_s=args.grace)
    for relay in relays:
        relay.join(1)  # a child that left the group may still hold the pipe
    return status


if __name__ == "__main__":
    sys.exit(main())
