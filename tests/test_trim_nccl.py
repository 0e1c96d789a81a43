"""A small NCCL for one architecture: the fat binaries of a made-up library."""

import io
import struct
import tarfile
import zipfile

from tools import trim_nccl


def fat_binary(*architectures):
    headers = [struct.pack("<HHIQ12sI32s", 2, 257, 64, 99, b"h" * 12, each, b"h" * 32) for each in architectures]
    return trim_nccl.MAGIC + struct.pack("<Q", 163 * len(headers)) + b"".join(header + b"x" * 99 for header in headers)


def test_the_archive_comes_in_parts(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "nccl.whl", "w") as files:
        files.writestr("nvidia/nccl/lib/libnccl.so.2", b"library" + fat_binary(80, 90) + b"end")
        files.writestr("nvidia/nccl/include/nccl.h", "header")
    monkeypatch.setattr(trim_nccl.subprocess, "run", lambda *args, **more: None)  # strip wants an ELF file
    monkeypatch.setattr(trim_nccl, "PART_BYTES", 100)
    parts = trim_nccl.trim(tmp_path / "nccl.whl", 90, tmp_path / "out")
    assert len(parts) > 1 and all(part.stat().st_size <= 100 for part in parts)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
        assert set(archive.getnames()) == {"nccl/lib/libnccl.so.2", "nccl/include/nccl.h"}
        library = archive.extractfile("nccl/lib/libnccl.so.2").read()
    assert library == b"library" + fat_binary(90) + bytes(64 + 99) + b"end"
