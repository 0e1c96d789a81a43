"""The network interface of this machine that reaches an address."""

import contextlib
import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


def _addresses() -> dict[str, str]:
    """IP address -> interface name: one IPv4 address per interface, and all IPv6 addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(reply[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            number, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(number)))] = name
    return found


def interface_to(address: str) -> str | None:
    """Name of the interface that reaches `address` (host:port); None if it is unknown.

    A host may map its own name to a loopback address, which other hosts can't reach. So the loopback interface is
    returned only if `address` itself is a loopback address or "localhost": then all processes are on this machine.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        for family, kind, *_, target in socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                own = probe.getsockname()[0].partition("%")[0]
                if ipaddress.ip_address(own).is_loopback and own != host and host != "localhost":
                    return None
                if (name := _addresses().get(own)) is not None:
                    return name
    except (OSError, ValueError):
        pass
    return None
