"""Several hosts on one machine: Linux namespaces, connected by a bridge over links of a given rate and delay.

A host has its own network, mounts (/proc, /dev/shm), IPC, processes and host name; files are shared. All objects are in
anonymous namespaces, which end with the processes that hold them. These processes end when a pipe from this process
closes, so a killed test leaves nothing behind.

The kernel enforces rates. A process forwards packets with a delay, to an accuracy of about 0.1 ms. It uses a part of a
processor, up to all of it near 5 Gbit/s.
"""

import collections
import contextlib
import ctypes
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
NAMESPACES = ("--net", "--mount", "--ipc", "--pid", "--uts")
MTU_BYTES = 1500
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@functools.cache
def why_not():
    """The reason in one line why this machine can't create hosts; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    try:
        with Hosts(1, rate_bits_per_s=1e9):
            return ""
    except (OSError, RuntimeError) as error:
        return f"this kernel or container refuses: {error}".replace("\n", " ")


class Hosts:
    """Hosts 0 .. num_hosts - 1, each with one interface, eth0.

    Args:
      num_hosts: number of hosts.
      rate_bits_per_s: rate of each link in each direction; None means no limit.
      delay_s: one-way delay between any two hosts.
    """

    def __init__(self, num_hosts, *, rate_bits_per_s=None, delay_s=0.0):
        self.num_hosts = num_hosts
        self._anchors = []  # the processes that hold the namespaces: hosts, then the switch
        self._pids = []  # process ids by which commands enter the namespaces
        self._started = []
        try:
            for host in range(num_hosts):
                # Every host has the names of the others in /etc/hosts, as programs expect.
                names = "".join(f"{self.address(h)} host{h}\\n" for h in range(num_hosts))
                self._anchor(
                    NAMESPACES,
                    f"mount -t tmpfs shm /dev/shm && hostname host{host} && cd /dev/shm && "
                    f"printf '127.0.0.1 localhost\\n{names}' > hosts && mount --bind hosts /etc/hosts && rm hosts",
                )
            self._anchor(("--net",), "true")
            self._in_switch("ip link add bridge type bridge")
            self._in_switch("ip link set bridge up")
            for host in range(num_hosts):
                self._plug(host, delay_s > 0)
            if rate_bits_per_s is not None or delay_s > 0:
                for host in range(num_hosts):
                    self._shape(host, rate_bits_per_s, delay_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def address(self, host):
        return f"10.77.{host // 250}.{host % 250 + 1}"

    def argv(self, host, argv, cwd=None):
        """Returns the command line that runs ``argv`` on a host."""
        enter = ["nsenter", "--target", str(self._pids[host]), *NAMESPACES, "--"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', cwd or os.getcwd(), *argv]

    def start(self, host, argv, *, cwd=None, **popen):
        """Starts ``argv`` on a host and returns its Popen. `stop` and `close` end it."""
        process = subprocess.Popen(self.argv(host, argv, cwd), start_new_session=True, **popen)
        self._started.append(process)
        return process

    def run(self, host, argv, *, timeout_s=60):
        """Runs ``argv`` on a host and returns its output. Raises RuntimeError if it fails."""
        process = self.start(host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.stop(process)
            raise RuntimeError(f"host {host}: {argv} did not end within {timeout_s} s") from None
        self._started.remove(process)  # its id may belong to another process later
        if process.returncode != 0:
            raise RuntimeError(f"host {host}: {argv} ended with {process.returncode}: {output}")
        return output

    @staticmethod
    def stop(process):
        """Kills a command and its children (signal 9)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()

    def sent_bytes(self, host):
        (link,) = json.loads(self._in(host, "ip -json -statistics link show eth0"))
        return link["stats64"]["tx"]["bytes"]

    def cut(self, host):
        """Cuts the link of a host: packets are lost, and only the host's kernel gets a notification."""
        self._in_switch(f"ip link set port{host} down")

    def restore(self, host):
        self._in_switch(f"ip link set port{host} up")

    def close(self):
        for process in self._started:
            self.stop(process)
        for anchor in self._anchors:
            self.stop(anchor)  # the first process of a host: the kernel kills the others
        self._started, self._anchors, self._pids = [], [], []

    def _anchor(self, namespaces, setup):
        """Starts a process in new namespaces; it ends when the pipe from this process closes."""
        options = [*namespaces, "--fork", "--kill-child", *(["--mount-proc"] if "--pid" in namespaces else [])]
        script = f"{setup} && ip link set lo up && echo ready && exec cat"
        anchor = subprocess.Popen(["unshare", *options, "sh", "-c", script], start_new_session=True, text=True, **PIPES)
        self._anchors.append(anchor)
        if anchor.stdout.readline() != "ready\n":
            raise RuntimeError(f"unshare {' '.join(options)}: {anchor.stderr.read().strip()}")
        self._pids.append(child_of(anchor.pid))

    def _plug(self, host, delayed):
        """A cable: eth0 of the host, its other end in the switch. A delayed one has a forwarding process in between."""
        port = f"port{host}"
        self._in_switch(f"ip link add {port} mtu {MTU_BYTES} type veth peer name eth0 netns {self._pids[host]}")
        self._in(host, f"ip address add {self.address(host)}/16 dev eth0")
        self._in(host, "ip link set eth0 up")
        into_bridge = port
        if delayed:
            into_bridge = f"bridge{host}"
            self._in_switch(f"ip link add late{host} type veth peer name {into_bridge}")
            self._in_switch(f"ip link set late{host} up")
        self._in_switch(f"ip link set {into_bridge} master bridge")
        for name in {port, into_bridge}:
            self._in_switch(f"ip link set {name} up")

    def _shape(self, host, rate_bits_per_s, delay_s):
        rate = f"rate {int(rate_bits_per_s)}bit" if rate_bits_per_s is not None else ""
        # Limits both directions: host to switch and switch to host. The burst lasts 1 ms or is the largest packet.
        burst_bytes = max(int((rate_bits_per_s or 0) / 8 * 1e-3), 70_000)
        limit = f"tbf {rate} burst {burst_bytes} latency 50ms"
        if rate:
            self._in_switch(f"tc qdisc add dev port{host} root {limit}")
            self._in(host, f"tc qdisc add dev eth0 root {limit}")
        if delay_s > 0:
            wire = [sys.executable, os.path.abspath(__file__), f"port{host}", f"late{host}", str(delay_s)]
            enter = ["nsenter", "--target", str(self._pids[-1]), "--net", "--"]
            process = subprocess.Popen([*enter, *wire], start_new_session=True, text=True, **PIPES)
            self._started.append(process)
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the process that delays packets: {process.stderr.read().strip()}")

    def _in_switch(self, command):
        self._in(-1, command)

    def _in(self, anchor, command):
        """Runs a command in the network of a host, or of the switch, and returns its output."""
        argv = ["nsenter", "--target", str(self._pids[anchor]), "--net", "--", *command.split()]
        result = subprocess.run(argv, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{command}: {result.stderr.strip()}")
        return result.stdout


def child_of(pid):
    """Process id of the only child of a process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                    return int(entry)
    raise RuntimeError(f"process {pid} has no child")


def forward(near, far, delay_s):
    """Carries packets from interface ``near`` to ``far`` after ``delay_s``, and from ``far`` to ``near`` at once.

    Packets have the kernel's segmentation header, so large ones are forwarded whole. Ends at the end of standard input.
    """
    sol_packet, packet_vnet_hdr, packet_ignore_outgoing, pr_set_timerslack = 263, 15, 23, 29
    with contextlib.suppress(PermissionError):  # a link does not wait for the processors of the hosts
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1, 0, 0, 0)  # sleeps end on time
    ends = []
    for name in (near, far):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # all protocols
        end.setsockopt(sol_packet, packet_vnet_hdr, 1)
        end.setsockopt(sol_packet, packet_ignore_outgoing, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
        end.bind((name, 0))
        end.setblocking(False)
        ends.append(end)
    print("ready", flush=True)
    waiting = collections.deque()
    while True:
        timeout_s = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        readable = select.select([*ends, sys.stdin], [], [], timeout_s)[0]
        if sys.stdin in readable:
            return
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            send(ends[1], waiting.popleft()[1])
        for end in readable:
            for _ in range(32):
                try:
                    packet = end.recv(1 << 17)
                except (BlockingIOError, OSError):  # no more packets, or the link is cut
                    break
                if end is ends[0]:
                    waiting.append((now + delay_s, packet))
                else:
                    send(ends[0], packet)


def send(end, packet):
    with contextlib.suppress(OSError):  # a full queue or a cut link loses packets
        end.send(packet)


if __name__ == "__main__":
    forward(sys.argv[1], sys.argv[2], float(sys.argv[3]))
