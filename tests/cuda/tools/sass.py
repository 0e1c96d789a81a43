"""Bytes that a thread block keeps in flight, read from compiled kernels.

They are the bytes of a function's loads that are issued before the first of them is used. One thread block runs per
multiprocessor (SM).
"""

import dataclasses
import re
import subprocess

# Little's law: bytes in flight = bandwidth * latency. NVLink's bandwidth per GPU and direction; the latency of a load
# from a peer is 1.2 to 1.5 us (estimates, not measured by jaxcomm).
NEEDED_BYTES = {"sm_90": 0.6e6, "sm_100": 1.2e6}  # 450 and 900 GB/s
SMS = 32  # that must suffice for the whole bandwidth

_FUNCTION = re.compile(r"^(?:\.text\.|\$[\w$]*\$)(?P<name>\w+):$")
_LABEL = re.compile(r"^(?P<label>\.L_\w+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclasses.dataclass(frozen=True)
class Burst:
    """Loads of a thread of which none is used before the last is issued."""

    loads: int
    bytes: int


def loaded_bytes(op):
    """The bytes of a load from global memory; 0 for any other instruction, also for loads that poll a counter."""
    name, *modifiers = op.split(".")
    if name not in ("LD", "LDG") or "STRONG" in modifiers:
        return 0
    return next((_BYTES[modifier] for modifier in modifiers if modifier in _BYTES), 4)


def _registers(op, operands):
    wide = op.startswith("D") or ".WIDE" in op or ".64" in op or ".128" in op
    found = set()
    for number, pair in _REGISTER.findall(operands):
        found.add(int(number))
        if wide or pair:
            found.add(int(number) + 1)
    return found


class _Scan:
    """Follows the instructions of a function in the order of the code."""

    def __init__(self):
        self.bursts = []
        self._outstanding = set()  # registers
        self._loads = self._bytes = 0
        self._labels = set()

    def label(self, name):
        self._labels.add(name)

    def instruction(self, op, operands):
        size = loaded_bytes(op)
        if size == 0:
            target = _TARGET.search(operands)
            backward = op.startswith("BRA") and target is not None and target[1] in self._labels
            ends = backward or op.split(".")[0] in ("CALL", "RET", "EXIT", "BAR")
            if ends or _registers(op, operands) & self._outstanding:
                self.end()
            return
        destination, _, address = operands.partition(",")
        first = int(_REGISTER.search(destination)[1])
        written = set(range(first, first + max(size // 4, 1)))
        # A load to or from the register of an outstanding load waits for that load.
        if (written | _registers(op, address)) & self._outstanding:
            self.end()
        self._outstanding |= written
        self._loads += 1
        self._bytes += size

    def end(self):
        if self._loads:
            self.bursts.append(Burst(self._loads, self._bytes))
        self._outstanding, self._loads, self._bytes = set(), 0, 0


def bursts(text):
    """The bursts of each function in the output of `nvdisasm -c`, in the order of the code."""
    found = {}
    scan = None
    for line in text.splitlines():
        stripped = line.strip()
        if match := _FUNCTION.match(stripped):
            if scan:
                scan.end()
            scan = _Scan()
            found[match["name"]] = scan.bursts
        elif scan and (match := _LABEL.match(stripped)):
            scan.label(match["label"])
        elif scan and (match := _INSTRUCTION.search(stripped)):
            scan.instruction(match["op"], match["operands"])
    if scan:
        scan.end()
    return found


def disassemble(wheels, cubin):
    command = (wheels / "cu13" / "bin" / "nvdisasm", "-c", cubin)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def needed(architecture):
    """Bytes in flight per SM that fill NVLink."""
    return NEEDED_BYTES[architecture] / SMS
