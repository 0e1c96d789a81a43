"""reshard() between processes: values of random arrays, places of calls, failures that leave sources intact."""

import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys

import pytest
from ranks import PIPES, PROMPT_S, environment, free_address

PROGRAM = pathlib.Path(__file__).with_name("reshard_program.py")
ONE, TWO = pytest.param(1, marks=pytest.mark.full), 2
pytestmark = pytest.mark.deadline(280)


def run(what, processes, nodes=1, devices=2, dead=(), **more):
    """What the processes print, by rank; None of those that die."""
    address, running = free_address(), []
    for rank in range(processes):
        settings = {"DEVICES": str(devices), "JAXCOMM_NODE_ID": str(rank * nodes // processes), **more}
        env = environment(rank, processes, address, **settings)
        running.append(subprocess.Popen([sys.executable, str(PROGRAM), what], env=env, text=True, **PIPES))
    try:
        with concurrent.futures.ThreadPoolExecutor(processes) as threads:
            outputs = list(threads.map(lambda process: process.communicate(timeout=200), running))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for rank, (process, (_, errors)) in enumerate(zip(running, outputs, strict=True)):
        assert process.returncode == (-9 if rank in dead else 0), f"r{rank} | {errors[-3000:]}"
    return [None if rank in dead else json.loads(out.splitlines()[-1]) for rank, (out, _) in enumerate(outputs)]


@pytest.mark.parametrize(
    ("processes", "nodes", "devices", "single_copy"),
    [(2, 1, 4, "1"), (4, 2, 2, "1"), (3, 3, 2, "1"), pytest.param(4, 1, 2, "0", marks=pytest.mark.full),
     pytest.param(4, 4, 1, "1", marks=pytest.mark.full)],
)  # fmt: skip
def test_every_shard_has_the_right_elements(processes, nodes, devices, single_copy, request):
    seeds = "1" if request.config.getoption("--size") == "default" else "12"
    settings = {"SEEDS": seeds, "JAXCOMM_SINGLE_COPY": single_copy, "JAXCOMM_TIMEOUT_S": "60"}
    assert run("values", processes, nodes, devices, **settings) == [{"checked": True}] * processes


def test_xla_moves_between_any_devices_of_processes():
    """As on GPUs: jax.device_put, or a composition of jax.lax.ppermute where it refuses."""
    said = run("values", 2, 1, 2, SEEDS="1", ALGORITHM="xla", JAXCOMM_TIMEOUT_S="60")
    assert said == [{"checked": True}] * 2


def test_strided_shards_from_another_host_need_no_second_buffer():
    """Shared memory, counted by its files, which grow by doubling: four chunks per pair, and no copy of a shard."""
    chunk, pairs = 1 << 20, 2 * 2
    for said in run("memory", 2, 2, JAXCOMM_TIMEOUT_S="60"):
        assert said["bytes"] <= 2 * 4 * pairs * chunk, said


@pytest.mark.parametrize("nodes", [ONE, TWO])
def test_calls_after_an_error_are_right(nodes):
    """Also if one process has raised before the transfer: the others get an error once it calls again."""
    given, last = run("recovers", 2, nodes, JAXCOMM_TIMEOUT_S="60")
    assert [text.count("calls do not match") for text in given["texts"]] == [1, 1, 1, 1], given
    for text in (given["texts"][0], last["texts"][0]):
        assert "calls do not match" in text and "elements of int8" in text and "elements of float32" in text, text
    assert "deleted" in last["texts"][1] and "calls do not match" in last["texts"][3], last


@pytest.mark.parametrize("nodes", [ONE, TWO])
def test_threads_call_in_the_same_order(nodes):
    """Other orders are errors in all calls, which show both sides, also if the meshes have different devices."""
    for said in run("threads", 2, nodes, JAXCOMM_TIMEOUT_S="60"):
        equal, different, again = said["texts"]
        assert equal == again == ["", ""], said
        for text in different:
            assert re.search(r"calls do not match: ranks .*\(process [01]\) are in .*\(process [01]\) are in", text), (
                said
            )


def test_a_dead_process_is_named():
    """test_failures.py has one that dies while its pieces are on their way."""
    said, _ = run("gone", 2, 2, dead=[1], JAXCOMM_TIMEOUT_S=str(4 * PROMPT_S))
    assert re.search(r"reshard at jaxcomm.reshard: .*ranks \[2, 3\] \(process 1\)", said["text"]), said
