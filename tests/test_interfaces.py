"""The interface that reaches an address, on this machine with any interfaces."""

import ipaddress
import socket

import pytest

from jaxcomm._processes import interfaces


def test_own_addresses_lead_to_their_interfaces():
    own = {text: name for text, name in interfaces._addresses().items() if not ipaddress.ip_address(text).is_link_local}
    assert own["127.0.0.1"] == "lo"
    for text, name in own.items():
        assert interfaces.interface_to(f"[{text}]:7000" if ":" in text else f"{text}:7000") == name


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1"])
def test_names_of_the_loopback_interface_are_ignored(monkeypatch, loopback):
    """As Debian's /etc/hosts has it for the machine's own name: other hosts are not reached that way."""
    resolved = []

    def resolve(host, port, **kind):
        resolved.append(host)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (loopback, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert interfaces.interface_to("head-node:7000") is None
    assert interfaces.interface_to("localhost:7000") == "lo"
    assert resolved == ["head-node", "localhost"]


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http x", "name.invalid:7000"])
def test_addresses_without_an_interface(address):
    assert interfaces.interface_to(address) is None
