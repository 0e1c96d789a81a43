"""The processors of a node: accesses of small plans by hand, and times from given work."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from jaxcomm.simulate import cpus, here_rows

CPU = pathlib.Path(__file__).parents[2] / "ffi" / "cpu"
N = 8
MIB = 1 << 20
# Rates are powers of two, so that times by hand are exact.
CPUS = cpus.Cpus(
    devices=N, processors=2, step_s=2.0**-20, private=2.0**35, shared=2.0**34, memory=2.0**33, memory_of_all=2.0**34,
    call_s=2.0**-18, remote=2.0**32,
)  # fmt: skip
STEPS, PRIVATE, SHARED, READ, WRITTEN, CALLS, REMOTE = range(7)


def _work(op, algorithm, size, devices=N, chunk=0, **changes):
    scope = "process" if devices == N else "node"
    asked = here_rows.request(op, size, scope, N, N)
    asked.chunk_count = chunk
    return cpus.work(asked, algorithm, 4, dataclasses.replace(CPUS, devices=devices, **changes))


def test_one_thread_copies_in_its_cache():
    """The root of a small broadcast copies to all ranks. The second call finds everything in the cache."""
    made = _work("pbroadcast", "direct", 4096)
    assert not made.parallel and not made.of_processes.any() and not made.of_ranks[1:].any()
    assert made.of_ranks[0].tolist() == [N, 2 * N * 4096, 0, 0, 0, 0, 0]
    assert made.time_s(CPUS) == N * 2.0**-20 + 2 * N * 4096 / 2.0**35


def test_the_data_of_a_call_select_the_memory():
    """Copies of one block per rank: operands and results of 512 KiB, 4 MiB, 128 MiB."""
    for size, read, written in ((32768, PRIVATE, PRIVATE), (MIB // 4, SHARED, SHARED), (8 * MIB, READ, WRITTEN)):
        made = _work("ppermute", "direct", size)
        assert made.parallel == (N * size >= MIB)
        total = made.of_ranks.sum(axis=0)
        wanted = np.zeros(7)
        wanted[STEPS] = N
        wanted[read] += N * size
        wanted[written] += N * size
        assert total.tolist() == wanted.tolist(), size


def test_cache_sizes():
    """4 MiB of data in caches of 1 and 2 MiB, in order: nothing is left of the last call. In a cache of 8 MiB, all."""
    few = _work("ppermute", "direct", MIB // 4, cache_bytes=(MIB, 2 * MIB))
    assert few.of_ranks.sum(axis=0)[READ : WRITTEN + 1].tolist() == [2 * MIB, 2 * MIB]
    own = _work("ppermute", "direct", MIB // 4, processors=1, cache_bytes=(8 * MIB, 8 * MIB))
    assert own.of_ranks.sum(axis=0)[PRIVATE] == 4 * MIB


def test_chunks_are_read_from_the_cache():
    """The root of a large broadcast fetches each chunk once; the other seven copies find it in the own cache. Streamed
    results take no place in a cache, so the operand stays in the shared one."""
    made = _work("pbroadcast", "direct", 8 * MIB, chunk=32768)
    assert made.of_ranks[0].tolist() == [N * 64, 7 * 8 * MIB, 8 * MIB, 0, N * 8 * MIB, 0, 0]


def test_parts_of_large_calls():
    """Few, but none is larger than the cache of a processor or than a chunk, which would be found after its fetch."""
    asked = here_rows.request("ppermute", 1 << 30, "process", N, N)
    assert cpus._Call(asked, "direct", 4, CPUS).part == MIB
    made = _work("pbroadcast", "direct", 64 * MIB, chunk=32768)
    assert made.of_ranks[0, [PRIVATE, READ]].tolist() == [7 * 64 * MIB, 64 * MIB]


def test_writes_of_another_processor_are_not_in_the_own_cache():
    caches = cpus._Caches(CPUS, 1024)
    assert [caches.use(0, "a", True), caches.use(1, "a", False), caches.use(1, "a", False)] == [
        WRITTEN,
        SHARED,
        PRIVATE,
    ]
    assert [caches.use(0, "a", True), caches.use(1, "a", False)] == [PRIVATE, SHARED]


def test_caches_keep_what_was_used_last():
    caches = cpus._Caches(dataclasses.replace(CPUS, cache_bytes=(2048, 4096)), 1024)
    for key in "abac":
        caches.use(0, key, False)
    assert [caches.use(0, key, False) for key in "acb"] == [PRIVATE, PRIVATE, SHARED]


def test_processes_read_each_other_by_system_calls():
    """A ring over two processes: ranks 0 and 4 read from the other process."""
    made = _work("ppermute", "direct", 32768, devices=4)
    for rank in range(N):
        remote = rank % 4 == 0
        assert made.of_ranks[rank].tolist() == [1, 0 if remote else 2 * 32768, 0, 0, 0, remote, 32768 * remote]
    assert not made.of_processes.any()


def test_small_operands_pass_through_windows():
    made = _work("ppermute", "direct", 4096, devices=4)
    assert made.of_processes[:, PRIVATE].tolist() == [4 * 2 * 4096] * 2  # each rank's operand into its window
    # Ranks 0 and 4 read windows that the other processor has just written.
    assert made.of_ranks.sum(axis=0).tolist() == [N, (N * 2 - 2) * 4096, 2 * 4096, 0, 0, 0, 0]


def test_without_single_copies_all_operands_pass_through_windows():
    made = _work("ppermute", "direct", 65536, devices=4, single_copy=False, remote=np.inf)
    assert (made.of_processes.sum(axis=1) == 4 * 2 * 65536).all()
    assert not made.of_ranks[:, CALLS].any()
    with pytest.raises(ValueError, match="processes of 4 of 8 ranks read each other with remote = inf"):
        _work("ppermute", "direct", 65536, devices=4, remote=np.inf)
    _work("ppermute", "direct", 65536, remote=np.inf)  # one process


def test_results_that_others_write_pass_through_windows():
    made = _work("all_to_all", "pairwise", 65536, devices=4)
    assert (made.of_processes.sum(axis=1) == 4 * 2 * 65536).all()
    assert not made.of_ranks[:, CALLS].any()


def test_sums_read_tiles_of_other_processes():
    """Rank r adds block r of all ranks: four of another process, in tiles of 128 KiB."""
    made = _work("psum_scatter", "direct", 2 * MIB, devices=4)
    block = 2 * MIB // N
    assert made.of_ranks[:, CALLS].tolist() == [4 * block // (128 << 10)] * N
    assert made.of_ranks[:, REMOTE].tolist() == [4 * block] * N


def _given(ranks_s, parallel, processes=1, written=0.0):
    ranks = np.zeros((N, 7))
    ranks[:, STEPS] = np.array(ranks_s) / CPUS.step_s
    ranks[0, WRITTEN] = written
    return cpus.Work(ranks, np.zeros((processes, 7)), parallel)


def test_times_by_hand():
    even, one = [1e-3] * N, [8e-3] + [0.0] * 7
    assert _given(even, False).time_s(CPUS) == pytest.approx(8e-3)  # one thread
    assert _given(even, True).time_s(CPUS) == pytest.approx((8e-3 + 26e-6) / 2)  # the second wakes up
    assert _given(one, True).time_s(CPUS) == pytest.approx(8e-3)  # a rank has one thread
    short = [1e-6] * N
    assert _given(short, True).time_s(CPUS) == pytest.approx(8e-6)  # done before the second is awake
    assert _given(even, False, 2).time_s(CPUS) == pytest.approx(4e-3)
    assert _given(one, False, 2).time_s(CPUS) == pytest.approx(8e-3)
    assert _given(even, False, 4).time_s(CPUS) == pytest.approx(4e-3)  # four processes take turns on two processors
    slow = dataclasses.replace(CPUS, memory_of_all=2.0**33)
    assert _given([0.0] * N, True, 1, 2.0**34).time_s(slow) == pytest.approx(2)  # the bandwidth of the memory
    single = dataclasses.replace(CPUS, processors=1)
    assert _given(even, True).time_s(single) == pytest.approx(8e-3)
    many = dataclasses.replace(CPUS, processors=64)  # eight have a rank, of which seven wake up
    assert _given(even, True).time_s(many) == pytest.approx((8e-3 + 7 * 26e-6) / 8)


def test_constants_are_those_of_the_executor():
    sources = "".join(path.read_text() for path in sorted(CPU.iterdir()) if path.suffix in (".cc", ".h"))
    for name, value in (
        ("kMinParallelBytes", cpus._PARALLEL_BYTES),
        ("kSmallBytes", cpus._SMALL_BYTES),
        ("kRemoteTileBytes", cpus._TILE_BYTES),
        ("kStreamBytes", cpus._STREAM_BYTES),
    ):
        found = re.findall(rf"constexpr int64_t {name} = (\d+) << (\d+);", sources)
        assert [int(a) << int(b) for a, b in found] == [value], name


def test_devices_make_up_the_ranks():
    with pytest.raises(ValueError, match="cpus: got 8 ranks, expected a multiple of 3 devices"):
        _work("ppermute", "direct", 4096, devices=3)
