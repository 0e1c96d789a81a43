"""Reads the reports of ptxas that cmake/keep_ptxas.py writes."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel, compiled for one architecture."""

    name: str
    architecture: str
    stack_bytes: int
    spill_bytes: int
    registers: int


_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'\n"
    r"ptxas info +: Function properties for \w+\n"
    r" +(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r"ptxas info +: Used (?P<registers>\d+) registers"
)


def kernels(report):
    """All kernels of a report. Fails if it cannot parse the entry of a compiled kernel."""
    found = [
        Kernel(
            match["name"],
            match["architecture"],
            int(match["stack"]),
            int(match["stores"]) + int(match["loads"]),
            int(match["registers"]),
        )
        for match in _KERNEL.finditer(report)
    ]
    assert len(found) == report.count("Compiling entry function"), f"unknown form of report:\n{report}"
    return found


_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def spill_bytes(report):
    """The spill bytes of all kernels and called functions in a report."""
    return sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(report))


def check_no_spills(found):
    spilling = [kernel for kernel in found if kernel.spill_bytes]
    assert not spilling, "registers are spilled by " + "; ".join(map(str, spilling))
