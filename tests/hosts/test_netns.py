"""The hosts of other tests: links have their rate and delay, hosts share files only, and they leave nothing behind."""

import contextlib
import os
import subprocess
import sys
import time

import netns
import pytest

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())

ECHO = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(1 << 20):
        if len(data) == 1:
            connection.sendall(data)
"""
# Prints the median round trip in seconds, then bytes per second of 16 MiB.


def test_a_cut_link_carries_nothing_until_restored():
    with netns.Hosts(2) as hosts:
        server = hosts.start(0, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        reach = f"import socket; socket.create_connection(('{hosts.address(0)}', 5000), timeout=1)"
        hosts.run(1, [sys.executable, "-c", reach])
        hosts.cut(0)
        with pytest.raises(RuntimeError, match=r"(?s)host 1: .*(timed out|unreachable|No route)"):
            hosts.run(1, [sys.executable, "-c", reach])
        hosts.restore(0)
        hosts.run(1, [sys.executable, "-c", reach.replace("timeout=1", "timeout=10")])


def test_hosts_share_only_files(tmp_path):
    with netns.Hosts(2) as hosts:
        hosts.run(0, ["sh", "-c", f"echo 1 > /dev/shm/mine; echo 2 > {tmp_path}/shared"])
        assert hosts.run(1, ["cat", f"{tmp_path}/shared"]) == "2\n"
        assert hosts.run(1, ["ls", "/dev/shm"]) == ""
        assert not os.path.exists("/dev/shm/mine")
        assert hosts.run(1, ["hostname"]) == "host1\n"
        processes = hosts.run(1, ["sh", "-c", "ls /proc | grep -c '^[0-9]'"])
        assert int(processes) < 8
        assert os.readlink("/proc/self/ns/ipc") != hosts.run(0, ["readlink", "/proc/self/ns/ipc"]).strip()


def network_namespaces():
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{entry}/ns/net"))
    return found


def links():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.count("\n")


def wait_until_gone(namespaces):
    deadline = time.monotonic() + 10
    while network_namespaces() & namespaces:
        assert time.monotonic() < deadline, f"left behind: {network_namespaces() & namespaces}"
        time.sleep(0.05)


def test_nothing_is_left_after_close():
    before, links_before = network_namespaces(), links()
    with netns.Hosts(2, rate_bits_per_s=1e9, delay_s=1e-3) as hosts:
        hosts.start(0, ["sleep", "1000"])
        hosts.start(1, ["sh", "-c", "sleep 1001 & setsid sleep 1002"])
        made = network_namespaces() - before
        assert len(made) >= 3  # two hosts and the switch
        assert links() == links_before
    wait_until_gone(made)
