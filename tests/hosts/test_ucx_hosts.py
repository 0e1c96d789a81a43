"""The native network test's two processes on two hosts, over a link of 1 Gbit/s and 0.2 ms."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import netns
import pytest

BINARY = Path(__file__).parents[2] / "build" / "native" / "tests" / "transport" / "test_ucx_network"

pytestmark = [
    pytest.mark.timing,
    pytest.mark.full,
    pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not()),
    # On CI, the native tests are built before, so a missing one is a failure there.
    pytest.mark.skipif(
        not BINARY.exists() and not os.environ.get("CI"), reason=f"{BINARY}: run make test-native first"
    ),
]


def environment():
    wheel = importlib.util.find_spec("libucx")
    library = f"{wheel.submodule_search_locations[0]}/lib/libucp.so.0" if wheel else ""
    return {**os.environ, "JAXCOMM_TEST_DEVICES": "eth0", **({"JAXCOMM_UCX_LIBRARY": library} if library else {})}


def test_messages_between_hosts(tmp_path, capsys):
    with netns.Hosts(2, rate_bits_per_s=1e9, delay_s=0.2e-3) as hosts:
        before = hosts.counters(0)
        processes = [
            hosts.start(
                host,
                [str(BINARY), "measure", str(tmp_path), str(host)],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in range(2)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        sent_bytes = hosts.counters(0).sent_bytes - before.sent_bytes
        assert [process.returncode for process in processes] == [0, 0], outputs
    with capsys.disabled():
        print(f"\ntwo hosts, 1 Gbit/s, 0.2 ms:\n{outputs[0]}", end="")
    half_trip_us = float(re.search(r"half round trip ([0-9.]+) us", outputs[0])[1])
    gb_per_s = {int(size): float(rate) for size, rate in re.findall(r"(\d+) bytes: ([0-9.]+) GB/s", outputs[0])}
    assert 200 <= half_trip_us < 2000  # the delay of the link, on a loaded machine
    # Payloads used the link, not memory that real hosts would not share, and nearly filled the link.
    payload_bytes = 3 * (200 * (64 << 10) + 30 * (1 << 20) + 4 * (16 << 20))
    assert payload_bytes <= sent_bytes < 1.2 * payload_bytes
    assert 0.08 < gb_per_s[16 << 20] < 0.14
