"""The hosts of other tests: links have their rate and delay, hosts share files only, and they leave nothing behind."""

import contextlib
import os
import signal
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
MEASURE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=10)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(50):
    start = time.monotonic()
    connection.sendall(b"x")
    connection.recv(1)
    trips.append(time.monotonic() - start)
start = time.monotonic()
connection.sendall(bytes(16 << 20))
print(sorted(trips)[25], (16 << 20) / (time.monotonic() - start))
"""


def measure(**shape):
    with netns.Hosts(2, **shape) as hosts:
        server = hosts.start(0, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        trip_s, bytes_per_s = map(float, hosts.run(1, [sys.executable, "-c", MEASURE, hosts.address(0)]).split())
        return trip_s, bytes_per_s, hosts.counters(0), hosts.counters(1)


@pytest.mark.full
def test_hosts_talk_and_their_links_count():
    _, _, server, client = measure()
    assert 16 << 20 <= client.sent_bytes <= 1.1 * (16 << 20)
    assert 16 << 20 <= server.received_bytes <= 1.1 * (16 << 20)
    assert (
        server.received_packets >= 16
    )  # segments as the kernel handles them: up to 64 KiB, and more with large buffers


@pytest.mark.full
@pytest.mark.timing
def test_links_have_the_rate():
    trip_s, bytes_per_s, _, _ = measure(rate_bits_per_s=2e8)
    # Sockets and the shaper's burst buffer a part of the data.
    assert 0.7 * 2.5e7 < bytes_per_s < 1.6 * 2.5e7
    assert trip_s < 5e-3


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("delay_s", [1e-3, 10e-3])
def test_links_have_the_delay(delay_s):
    trip_s, _, _, _ = measure(rate_bits_per_s=1e9, delay_s=delay_s)
    assert 2 * delay_s <= trip_s < 2 * delay_s + 5e-3


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


@pytest.mark.full
def test_nothing_is_left_after_a_failure(monkeypatch):
    before = network_namespaces()
    made = set()

    def fail(*_):
        made.update(network_namespaces() - before)
        raise RuntimeError("no")

    monkeypatch.setattr(netns.Hosts, "_shape", fail)
    with pytest.raises(RuntimeError, match="no"):
        netns.Hosts(2, rate_bits_per_s=1e9)
    assert len(made) >= 3
    wait_until_gone(made)


@pytest.mark.full
def test_nothing_is_left_when_the_test_is_killed():
    before = network_namespaces()
    script = f"""
import sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
import netns
hosts = netns.Hosts(2, rate_bits_per_s=1e9, delay_s=1e-3)
hosts.start(0, ["sleep", "1000"])
print("ready", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout.readline() == "ready\n"
        made = network_namespaces() - before
        assert len(made) >= 3
        test.send_signal(signal.SIGKILL)
    wait_until_gone(made)


def test_why_not_names_missing_requirements(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not installed: ip, tc" in netns.why_not.__wrapped__()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netns.why_not.__wrapped__() == "network namespaces need root"


@pytest.mark.full
def test_a_failing_command_is_shown():
    with netns.Hosts(1) as hosts:
        with pytest.raises(RuntimeError, match=r"host 0: .* ended with 3: oops"):
            hosts.run(0, ["sh", "-c", "echo oops; exit 3"])
        with pytest.raises(RuntimeError, match="did not end within"):
            hosts.run(0, ["sleep", "100"], timeout_s=0.2)
