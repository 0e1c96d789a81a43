"""Bytes that a process has sent by TCP."""

import contextlib
import os
import socket
import struct


def acknowledged_bytes():
    """Number of bytes that this process has sent by TCP and that have arrived."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return total
