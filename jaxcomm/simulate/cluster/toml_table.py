"""Tables of a TOML file whose figures have units and origins."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

ORIGINS = ("datasheet", "measured", "fitted", "guess")
# Units of strings such as "400 Gb/s"; numbers have the first unit of their row.
RATES = {"GB/s": 1e9, "MB/s": 1e6, "TB/s": 1e12, "Gb/s": 0.125e9, "Tb/s": 0.125e12}
TIMES = {"us": 1e-6, "ns": 1e-9, "ms": 1e-3, "s": 1.0}
BYTES = {"GB": 1e9, "GiB": 2.0**30}
FLOPS = {"flop/s": 1.0, "Tflop/s": 1e12, "Pflop/s": 1e15}


class ClusterError(ValueError):
    """A file that describes no cluster. The text names file and key."""


def unknown(key: str, known: Iterable[str]) -> str:
    """The text of an error about an unknown key: the known key that it resembles, and all known keys."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, 1)
    return f"unknown key{f' (did you mean {near[0]}?)' if near else ''}; known are {', '.join(names)}"


def parse_number(text: str) -> int | float | str:
    """The number that a text holds, else the text."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value


class Table:
    """A table of the file with these keys, which are taken one by one. ``done`` refuses those that were not taken."""

    def __init__(self, file: str, path: str, values: Any, origins: dict[str, str], known: Iterable[str]):
        self.file, self.path, self.origins = file, path, origins
        if not isinstance(values, dict):
            raise self.error("", f"must be a table, got {values!r}")
        self.values = dict(values)
        self.origin = self.values.pop("origin", None)
        self.taken = {"origin"}
        self._only({"origin", *known})

    def error(self, key: str, text: str) -> ClusterError:
        name = ".".join(part for part in (self.path, key) if part)
        return ClusterError(f"{self.file}: {name}: {text}")

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        self.taken.add(key)
        if key not in self.values:
            if default is None:
                raise self.error(key, "is missing")
            return default
        value = self.values.pop(key)
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            raise self.error(key, f"got {value!r}, expected {_words(kind)}")
        return value

    def figure(self, key: str, units: Mapping[str, float], default: float | None = None, least: float = 0.0) -> float:
        """A quantity: a number in the first unit, or a string with a unit. It must have an origin."""
        if key not in self.values and default is not None:
            self.taken.add(key)
            return default
        value = self.take(key, (int, float, str))
        first, scale = next(iter(units.items()), ("", 1.0))
        if isinstance(value, str):
            found = re.fullmatch(r"\s*([-+\d.eE]+)\s*(\S+)\s*", value)
            if not found or found[2] not in units:
                raise self.error(key, f"got {value!r}, expected a number with one of the units {', '.join(units)}")
            try:
                value, scale = float(found[1]), units[found[2]]
            except ValueError:
                raise self.error(key, f"got {value!r}, expected a number with a unit") from None
        if not math.isfinite(value) or value < least or (least == 0 and value == 0 and units is RATES):
            limit = "more than 0" if units is RATES or units is FLOPS else f"at least {least:g}"
            raise self.error(key, f"got {value:g} {first}".rstrip() + f", expected {limit}")
        self._note_origin(key)
        return float(value * scale)

    def _note_origin(self, key: str) -> None:
        origin = self.origin.get(key) if isinstance(self.origin, dict) else self.origin
        if not isinstance(origin, str):
            raise self.error(key, f"has no origin; add `origin` with one of {', '.join(ORIGINS)}")
        if origin.split(":")[0] not in ORIGINS:
            raise self.error(
                "origin", f"got {origin!r}, expected one of {', '.join(ORIGINS)}, and a source after a colon"
            )
        self.origins[f"{self.path}.{key}"] = origin

    def _only(self, names: set[str]) -> None:
        """Refuses other keys, also in the table of origins: a key that is written wrongly is missing too."""
        extra = (set(self.values) | set(self.origin if isinstance(self.origin, dict) else ())) - names
        for key in sorted(extra):
            raise self.error(key, unknown(key, names))

    def done(self) -> None:
        """Refuses keys that were not taken."""
        self._only(self.taken)


def _words(kind: type | tuple[type, ...]) -> str:
    kinds: Iterable[type] = kind if isinstance(kind, tuple) else (kind,)
    names = {
        int: "an integer",
        float: "a number",
        str: "a text",
        bool: "true or false",
        list: "a list",
        dict: "a table",
    }
    return " or ".join(names[k] for k in kinds)
