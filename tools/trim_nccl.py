"""Makes a small NCCL for one architecture of GPUs from the wheel of PyPI, for machines that have no network.

    pip download --no-deps -d wheels nvidia-nccl-cu13==2.30.7
    trim_nccl.py wheels/*.whl sm_90 out     # writes out/nccl.tar.xz.00, .01, ...: each smaller than 60 MB
    cat out/nccl.tar.xz.* | tar -xJ         # on the machine with the GPU: the folder nccl

Removes the debug information and the machine code of other architectures. The file keeps its layout: unused bytes
become zeros, which take no space in the archive.
"""

import argparse
import io
import os
import pathlib
import struct
import subprocess
import tarfile
import zipfile

PART_BYTES = 60_000_000
# A fat binary is a header (magic, version, size of the header, size of the entries), then the entries. An entry is a
# header (kind, version, size of the header, size of the payload, ..., architecture at byte 28), then the payload.
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
ENTRY, ARCHITECTURE_AT, LEAST_HEADER = struct.Struct("<HHIQ"), 28, 64


def keep(library: bytearray, architecture: int) -> int:
    """Removes the entries of other architectures from all fat binaries of a library. Returns the number that stays.

    Raises:
      ValueError: an entry is not as expected, or a fat binary with code has none for this architecture.
    """
    kept = 0
    at = library.find(MAGIC)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", library, at + 8)
        begin = at + 16
        end, entry, stay = begin + size, begin, b""
        while entry < end:
            kind, _, header_bytes, payload_bytes = ENTRY.unpack_from(library, entry)
            if kind not in (1, 2) or header_bytes < LEAST_HEADER or entry + header_bytes + payload_bytes > end:
                raise ValueError(f"the fat binary at byte {at} has an unknown entry at byte {entry}")
            if struct.unpack_from("<I", library, entry + ARCHITECTURE_AT)[0] == architecture:
                stay += library[entry : entry + header_bytes + payload_bytes]
                kept += 1
            entry += header_bytes + payload_bytes
        library[begin:end] = stay.ljust(size, b"\0")
        struct.pack_into("<Q", library, at + 8, len(stay))
        at = library.find(MAGIC, end)
    if not kept:
        raise ValueError(f"the library has no code for sm_{architecture}")
    return kept


def trim(wheel: pathlib.Path, architecture: int, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the archive in parts. Returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    library = out / "libnccl.so.2"
    archive = io.BytesIO()
    with zipfile.ZipFile(wheel) as files, tarfile.open(fileobj=archive, mode="w:xz", preset=6) as tar:
        library.write_bytes(files.read("nvidia/nccl/lib/libnccl.so.2"))
        subprocess.run(("strip", "--strip-debug", library), check=True)
        code = bytearray(library.read_bytes())
        print(f"{keep(code, architecture)} entries for sm_{architecture}")
        library.write_bytes(code)
        tar.add(library, "nccl/lib/libnccl.so.2")
        for name in files.namelist():
            if name.startswith("nvidia/nccl/include/") and not name.endswith("/"):
                info = tarfile.TarInfo(os.path.relpath(name, "nvidia"))
                info.size = files.getinfo(name).file_size
                tar.addfile(info, io.BytesIO(files.read(name)))
    packed = archive.getvalue()
    parts = []
    for number, begin in enumerate(range(0, len(packed), PART_BYTES)):
        parts.append(out / f"nccl.tar.xz.{number:02}")
        parts[-1].write_bytes(packed[begin : begin + PART_BYTES])
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("architecture", type=lambda text: int(text.removeprefix("sm_")), help="such as sm_90")
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    for part in trim(args.wheel, args.architecture, args.out):
        print(f"{part}: {part.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
