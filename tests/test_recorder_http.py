"""The recorder's files over HTTP, without a program: ports of other servers, several writers of a file, and clocks."""

import concurrent.futures
import io
import socket
import threading
import types
import zipfile

import pytest

from jaxcomm.recorder import _cli, _file, _serve, _verdict


def archive(edit=bytes):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("process-0-1-1.ring", bytes(1000))
    data = edit(bytearray(content.getvalue()))
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def damaged(data):
    begin = 30 + len("process-0-1-1.ring")
    data[begin : begin + 4] = b"\xff" * 4
    return bytes(data)


GARBAGE = {
    "no HTTP": b"\x80\x01\r\n\r\n",
    "nothing": b"",
    "cut": archive()[:-10],
    "a page": b"HTTP/1.0 200 OK\r\n\r\n<html>",
    "damaged": archive(damaged),
}


@pytest.fixture
def answering():
    """Starts a server that gives one answer to each client, and returns its URL."""
    listeners = []

    def start(answer):
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=serve, args=(listeners[-1], answer), daemon=True).start()
        return f"http://127.0.0.1:{listeners[-1].getsockname()[1]}"

    def serve(listener, answer):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(1 << 16)
                client.sendall(answer)

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_another_server_is_a_note(answering, tmp_path, capsys, answer):
    url, good = answering(answer), answering(archive())
    (note,) = _serve.fetch([url, good], "token", tmp_path)
    assert note.startswith(f"{url} does not answer: ")
    assert (tmp_path / "process-0-1-1.ring").read_bytes() == bytes(1000)
    (tmp_path / "token").write_text("token")
    for command in (["analyze"], ["top", "--once"]):
        assert _cli.main([*command, "--url", url, "--token", str(tmp_path / "token")]) == 2
        assert note in capsys.readouterr().err


def test_several_processes_write_the_token(tmp_path):
    """Nobody sees an empty file, and no part stays."""
    token = tmp_path / "token"
    _serve._write(token, b"token")

    def write(_):
        for _ in range(200):
            _serve._write(token, b"token")
            assert token.read_bytes() == b"token"

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert token.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [token]


def test_hosts_that_answer_one_after_the_other(answering, tmp_path):
    """The copy knows the time of its host, until that host does not answer any more."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as files:
        files.comment = b"1700000000000000000"
        files.writestr("process-0-1-1.ring", b"ring")
    data = b"HTTP/1.0 200 OK\r\n\r\n" + content.getvalue()
    copy = tmp_path / "process-0-1-1.ring"
    assert not _serve.fetch([answering(data)], "token", tmp_path)
    assert _file._read_unix_ns(copy) == 1_700_000_000 * 10**9
    _serve.fetch([answering(b"")], "token", tmp_path)
    assert copy.exists() and _file._read_unix_ns(copy) == 0


@pytest.mark.parametrize("read_s, silent", [(101, (False, False)), (103, (True, False)), (0, (True, False))])
def test_a_silent_process_by_the_time_of_its_own_host(read_s, silent):
    headers = [{"alive_unix_ns": 100 * 10**9, "read_unix_ns": read_s * 10**9}]
    headers.append({"alive_unix_ns": 110 * 10**9, "read_unix_ns": 110 * 10**9})
    diagnosis = _verdict._Diagnosis.__new__(_verdict._Diagnosis)
    diagnosis.rings = {p: types.SimpleNamespace(header=header) for p, header in enumerate(headers)}
    assert tuple(map(diagnosis.is_silent, (0, 1))) == silent
