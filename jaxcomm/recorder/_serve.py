"""Counters and files of the recorder over HTTP, for programs that see no folder of this host."""

import concurrent.futures
import contextlib
import hmac
import http.client
import http.server
import io
import os
import pathlib
import re
import secrets
import tempfile
import threading
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence

import jax

from jaxcomm import _check, _core
from jaxcomm._processes import kv_store
from jaxcomm.recorder import _file, _prometheus, _runs, _start

TOKEN = "token"  # file in the folder of the recorder
_RINGS = "/rings"
_ANSWERS_S = 5.0
_PIECE_BYTES = 1 << 16
# Another server has the port: its answer is no HTTP, no archive, a damaged one, or one with a password.
_NO_ARCHIVE = (OSError, http.client.HTTPException, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
# Not over a proxy: the hosts of a job are near, and the token is for them.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class _Page(http.server.BaseHTTPRequestHandler):
    """The files of this job on this host at /rings, with the job's token; the counters at every other path."""

    timeout = 10.0  # of a client that sends or takes nothing
    token = ""

    def do_GET(self) -> None:
        if self.path != _RINGS:
            text = _prometheus.text(_prometheus.stats(), jax.process_index())
            self._answer(http.HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", text.encode())
        elif hmac.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {self.token}".encode()):
            self._answer(http.HTTPStatus.OK, "application/zip", _rings())
        else:
            self._answer(http.HTTPStatus.UNAUTHORIZED, "text/plain", b"the token of the job is missing\n")

    def _answer(self, status: http.HTTPStatus, kind: str, content: bytes) -> None:
        with contextlib.suppress(OSError):  # the client has gone, or takes nothing
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            for at in range(0, len(content), _PIECE_BYTES):  # the time limit is for one piece
                self.wfile.write(content[at : at + _PIECE_BYTES])

    def log_message(self, *_: object) -> None:
        pass  # requests are no output of the program


def _rings() -> bytes:
    """The files of all processes of this job in the folder, as a zip archive. Its comment: this host's time then."""
    run = _runs.around(_file.read(pathlib.Path(_core.recorder.path()), with_calls=False), with_calls=False)
    now = time.time_ns()
    files = {ring.path.name: ring.path.read_bytes() for ring in run.rings.values()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.comment = str(now).encode()
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def serve(port: int = 0, *, host: str = "127.0.0.1") -> int:
    """Serves this process's counters, and the files of all processes of the job on this host, until the process ends.

    Prometheus reads the counters at `http://host:port/metrics`. `python -m jaxcomm.recorder top --url http://host:port`
    and `analyze --url` read the files, also while the program hangs, if they have the job's token. All processes have
    the same token. This function writes it to the file `token` in the folder of the recorder, for this user only.

    With several processes, call it after `jaxcomm.distributed.initialize()`: it starts JAX's back ends otherwise.

    Args:
      port: where to listen; 0 takes a free port.
      host: address of this host to listen on. By default, only programs on this machine can connect. Whoever can
        connect can read the counters. Nothing is encrypted.

    Returns:
      The port.

    Raises:
      ValueError: the port is not between 0 and 65535.
      OSError: the port is taken, perhaps by another process of this host that serves the same files.
      RuntimeError: the key-value store of the job does not answer.
    """
    port = _check.whole("serve", "port", port, 0, 65535)
    _start.start()

    class Page(_Page):
        token = kv_store.kv_agree("recorder/token", secrets.token_hex(16))

    server = http.server.ThreadingHTTPServer((host, port), Page)
    if ring := _core.recorder.path():
        _write(pathlib.Path(ring).with_name(TOKEN), Page.token.encode())
    threading.Thread(target=server.serve_forever, daemon=True, name="jaxcomm-recorder-http").start()
    return int(server.server_port)


def _write(file: pathlib.Path, content: bytes) -> None:
    """For this user only. Several processes or threads may write one file: the latest content stays."""
    descriptor, part = tempfile.mkstemp(".part", f"{file.name}.", file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content)
        os.replace(part, file)
    except OSError:
        os.unlink(part)
        raise


def fetch(urls: Sequence[str], token: str, folder: pathlib.Path) -> list[str]:
    """Copies the files of hosts into a folder. Returns a line for each host that does not answer."""

    def fetch_one(url: str) -> str | None:
        request = urllib.request.Request(url.rstrip("/") + _RINGS, headers={"Authorization": f"Bearer {token}"})
        try:
            with _open(request, timeout=_ANSWERS_S) as answer:
                archive = zipfile.ZipFile(io.BytesIO(answer.read()))
            for name in archive.namelist():
                if re.fullmatch(rf"process-[\d-]+{re.escape(_file.SUFFIX)}", name):
                    _write(folder / name, archive.read(name))
                    _write(folder / f"{name}{_file.READ_AT}", archive.comment)
        except _NO_ARCHIVE as error:
            return f"{url} does not answer: {error}"
        return None

    for file in folder.glob(f"*{_file.READ_AT}"):
        file.unlink()  # a host that answers no more may be silent
    with concurrent.futures.ThreadPoolExecutor(len(urls)) as pool:
        return [note for note in pool.map(fetch_one, urls) if note]
