"""The wire format of protocol buffers: fields by number, without generated code.

Source of the format: https://protobuf.dev/programming-guides/encoding/
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}


class WireError(ValueError):
    """Bytes that are not a message."""


def varint(value: int) -> bytes:
    """Negative values take ten bytes, as int64."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The value, and the position after it.

    Raises:
      WireError: the data ends, or the value has more than 64 bits.
    """
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise WireError("a number ends early" if at >= len(data) else "a number has more than 64 bits")


def key(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def number(field: int, value: int) -> bytes:
    return key(field, VARINT) + varint(value)


def chunk(field: int, value: bytes) -> bytes:
    """A string, a nested message or a packed list."""
    return key(field, BYTES) + varint(len(value)) + value


def signed(value: int) -> int:
    """The int32 or int64 of a varint."""
    return value - (1 << 64) if value >> 63 else value


def zigzag(value: int) -> int:
    """The sint32 or sint64 of a varint."""
    return value >> 1 ^ -(value & 1)


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of each field. Fixed values are bytes.

    Raises:
      WireError: the data is not a message.
    """
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        wire = tag & 7
        if wire == VARINT:
            value, at = read_varint(data, at)
            yield tag >> 3, wire, value
            continue
        if wire == BYTES:
            size, at = read_varint(data, at)
        elif wire in _FIXED:
            size = _FIXED[wire]
        else:
            raise WireError(f"wire type {wire} of field {tag >> 3} is unknown")
        if at + size > len(data):
            raise WireError(f"field {tag >> 3} has {len(data) - at} of {size} bytes")
        yield tag >> 3, wire, data[at : at + size]
        at += size


def packed(wire: int, value: int | bytes) -> Iterator[int]:
    """The numbers of a repeated field, whether they are packed or not."""
    if wire == VARINT:
        assert isinstance(value, int)  # as `fields` yields
        yield value
        return
    assert isinstance(value, bytes)
    at = 0
    while at < len(value):
        found, at = read_varint(value, at)
        yield found


def unpack(wire: int, value: bytes, kind: str) -> Iterator[float | int]:
    """Fixed numbers of a field, packed or not. ``kind``: their letter in ``struct``."""
    size = struct.calcsize(kind)
    if len(value) % size:
        raise WireError(f"{len(value)} bytes are no list of numbers of {size} bytes")
    for (found,) in struct.iter_unpack("<" + kind, value):
        yield found


def messages(data: bytes) -> Iterator[bytes]:
    """Messages of a file, each after its length.

    Raises:
      WireError: the file ends inside a message.
    """
    at = 0
    while at < len(data):
        size, at = read_varint(data, at)
        if at + size > len(data):
            raise WireError(f"the last message has {len(data) - at} of {size} bytes")
        yield data[at : at + size]
        at += size
