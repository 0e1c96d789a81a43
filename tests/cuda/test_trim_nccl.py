"""A small NCCL for one architecture: the fat binaries of a made-up library."""

import io
import struct
import tarfile
import zipfile

import trim_nccl


def entry(architecture, payload, kind=2):
    header = struct.pack("<HHIQ", kind, 257, 64, len(payload)).ljust(28, b"h") + struct.pack("<I", architecture)
    return header.ljust(64, b"h") + payload


def fat_binary(*entries):
    return trim_nccl.MAGIC + struct.pack("<Q", sum(map(len, entries))) + b"".join(entries)


def test_the_archive_comes_in_parts(tmp_path, monkeypatch):
    wheel = tmp_path / "nccl.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(
            "nvidia/nccl/lib/libnccl.so.2",
            b"library" + fat_binary(entry(80, b"x" * 99), entry(90, b"y" * 99)) + b"end",
        )
        files.writestr("nvidia/nccl/include/nccl.h", "header")
    monkeypatch.setattr(trim_nccl.subprocess, "run", lambda *args, **more: None)  # strip wants an ELF file
    monkeypatch.setattr(trim_nccl, "PART_BYTES", 100)
    parts = trim_nccl.trim(wheel, 90, tmp_path / "out")
    assert len(parts) > 1 and all(part.stat().st_size <= 100 for part in parts)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
        assert set(archive.getnames()) == {"nccl/lib/libnccl.so.2", "nccl/include/nccl.h"}
        library = archive.extractfile("nccl/lib/libnccl.so.2").read()
    assert library == b"library" + fat_binary(entry(90, b"y" * 99)) + bytes(64 + 99) + b"end"
