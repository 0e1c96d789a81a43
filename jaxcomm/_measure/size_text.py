"""Sizes in bytes, as command lines give them and as tables show them."""

import argparse
import re

_POWERS = {None: 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MOST = 1 << 44  # more than any device holds


class SizeError(argparse.ArgumentTypeError, ValueError):
    """A text that is no size."""


def parse(text: str) -> int:
    """The bytes of "4096", "64KiB" or "64K" (64 x 1024), or "64KB" (64,000).

    Raises:
      SizeError: another text, 0, or more than 16 TiB.
    """
    found = re.fullmatch(r"\s*(\d+)\s*(?:([KMGT])(IB|B)?|B)?\s*", text.upper())
    if found:
        size = int(found[1]) * int((1000 if found[3] == "B" else 1024) ** _POWERS[found[2]])
        if 0 < size <= _MOST:
            return size
    raise SizeError(
        f"got {text!r}, expected a number of bytes up to 16 TiB, such as 256, 64K or 64KiB (65,536), or 64KB (64,000)"
    )


def text(size_bytes: int) -> str:
    """The bytes with the largest binary unit that is not above them."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} B"


def parse_list(text: str) -> tuple[int, ...]:
    """The sizes of "1K,1M", or of "64KiB..4GiB": every power of two times the first one, up to the last one.

    Raises:
      SizeError: a text that is no size, or a last size below the first one.
    """
    found = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size, most = parse(first), parse(last) if dots else 0
        if dots and most < size:
            raise SizeError(f"got {part!r}, expected the smaller size first: {last.strip()}..{first.strip()}")
        found.append(size)
        while (size := 2 * size) <= most:
            found.append(size)
    return tuple(found)
