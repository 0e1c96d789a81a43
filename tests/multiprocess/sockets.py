"""TCP sockets of a process."""

import contextlib
import ipaddress
import os
import socket
import struct


def _links():
    """Targets of the descriptors of this process."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield int(number), os.readlink(f"/proc/self/fd/{number}")


def acknowledged_bytes():
    """Number of bytes that this process has sent by TCP and that have arrived."""
    total = 0
    for number, target in _links():
        if target.startswith("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return total


def listening_ports():
    """Listening addresses of this process, as (family, address, port)."""
    own = {target for _, target in _links()}
    found = []
    for family, name in ((4, "tcp"), (6, "tcp6")):
        with open(f"/proc/self/net/{name}") as lines:
            for line in lines:
                _, local, _, state, *_ = fields = line.split()
                if state == "0A" and f"socket:[{fields[9]}]" in own:
                    words, _, port = local.partition(":")
                    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
                    found.append((family, str(ipaddress.ip_address(raw)), int(port, 16)))
    return found
