"""Programs of several processes that call reshard(): reshard_program.py <what>. Each ends with one JSON object."""

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import resharding

import jaxcomm
from jaxcomm import _reshard

jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
jaxcomm.distributed.initialize()
LAST = jax.process_index() == jax.process_count() - 1


def over(devices, spec):
    return NamedSharding(Mesh(np.array(devices), ("a",)), spec)


def halves():
    """The devices of the first and of the second half of all processes."""
    devices = jax.devices()
    return devices[: len(devices) // 2], devices[len(devices) // 2 :]


def values():
    for seed in range(int(os.environ["SEEDS"])):
        algorithm = os.environ.get("ALGORITHM")
        resharding.check_random(seed, 16, max_bytes=[None, 200][seed % 2], algorithm=algorithm)
    if os.environ.get("ALGORITHM") == "xla":
        array = resharding.place(np.arange(8), over(jax.devices(), P("a")))
        with contextlib.suppress(ValueError):
            jaxcomm.reshard(array, over(jax.devices(), P()), algorithm="xla", timeout_s=1)
            raise AssertionError("XLA's collectives have no limit")
    x = np.arange(960 * 1200, dtype=np.int32).reshape(960, 1200)  # read in place, and in chunks
    devices = jax.devices()
    columns = P(None, "a")
    pairs = [(over(devices, P("a")), over(devices[::-1], columns)), (over(devices, columns), over(devices[::-1], P()))]
    # Hosts forward chunks, in place and strided: whole copies to all others, and of halves to all.
    pairs += [(over(devices[:1], P()), over(devices[1:], P())), (over(devices[:2], columns), over(devices, P()))]
    pairs += [(over(devices[:2], columns), over(devices[len(devices) // 2 :], columns))]  # 3 x 2 devices: uneven cells
    for source, target in pairs:
        resharding.check(jaxcomm.reshard(resharding.place(x, source), target), x, target)
    if jax.process_count() == 2:
        roles()
    return {"checked": True}


def roles():
    """Processes with a source and with a destination call from different places, and run other programs between."""
    givers, takers = halves()
    source, target = over(givers, P("a")), over(takers, P(None, "a"))
    for i in range(3):
        x = resharding.values((8, 8), np.float32, i)
        if jax.process_index() == 0:
            array = resharding.place(x, source)
            jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones(i + 1)))
            jaxcomm.reshard(array, target)
        else:
            moved = jaxcomm.reshard(resharding.place(x, source), target)
            resharding.check(moved, x, target)


def shared_bytes():
    """Sizes of the shared memory of this process."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:jaxcomm" in os.readlink(f"/proc/self/fd/{number}"):
                found += os.stat(f"/proc/self/fd/{number}").st_size
    return found


def memory():
    """Columns of one process become rows of the other: every piece is strided at its destination."""
    givers, takers = halves()
    x = np.arange(1 << 24, dtype=np.float32).reshape(1 << 12, 1 << 12)
    source, target = over(givers, P(None, "a")), over(takers, P("a"))
    array = resharding.place(x, source)
    jax.block_until_ready(jaxcomm.reshard(resharding.place(x[:2, :2], source), target))
    before = shared_bytes()
    moved = jax.block_until_ready(jaxcomm.reshard(array, target))
    resharding.check(moved, x, target)
    return {"bytes": shared_bytes() - before}


def failing(move):
    """What the error of a reshard says, and whether its source is intact."""
    x = resharding.values((8, 8), np.float32, 1)
    array = resharding.place(x, over(jax.devices(), P("a")))
    try:
        jax.block_until_ready(move(array))
        text = ""
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    resharding.check(array, x, over(jax.devices(), P("a")))
    return {"text": text}


def in_threads(first, second, slow):
    """What two threads get from reshard() on meshes of different devices. The thread `first` has the earlier number.

    `slow`: its program takes long to compile.
    """
    devices = jax.devices()
    x = resharding.values((8, 8), np.float32, 1)
    meshes = devices[::-1], [devices[1], devices[-1]]
    arrays = [resharding.place(x, over(of, P("a"))) for of in meshes]
    program, began, calls = _reshard._program, threading.Event(), {}

    def compiled(*call):
        if threading.current_thread().name == str(first):
            began.set()
            time.sleep(3 if slow else 0)
        return program(*call)

    def move(i):
        target = over(meshes[i], P(None, "a"))
        try:
            resharding.check(jax.block_until_ready(jaxcomm.reshard(arrays[i], target)), x, target)
            calls[i] = ""
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            calls[i] = str(error)

    _reshard._program = compiled
    threads = [threading.Thread(target=move, args=[i], name=str(i)) for i in (first, second)]
    for thread in threads:
        thread.start()
        began.wait(60)
    for thread in threads:
        thread.join()
    _reshard._program = program
    return [calls[0], calls[1]]


def threads():
    """In equal orders, though one thread of one process is late; then in different orders; then in equal ones."""
    texts = [in_threads(0, 1, slow=LAST), in_threads(int(LAST), 1 - LAST, slow=False), in_threads(1, 0, slow=False)]
    return {"texts": texts}


def recovers():
    """Calls that fail in some processes, or that some do not make, and correct ones after them."""
    x = resharding.values((8, 8), np.float32, 1)
    array = resharding.place(x, over(jax.devices(), P("a")))
    target = over(jax.devices()[::-1], P("a"))
    other = resharding.place(np.zeros(16, np.int8), over(jax.devices(), P("a")))
    deleted = resharding.place(x, over(jax.devices(), P("a")))
    deleted.delete()
    texts, devices = [], jax.devices()
    elsewhere = over(devices[1:] + devices[:1] if LAST else devices[::-1], P("a"))
    for given, to in ((other, target), (deleted, target), (deleted, target), (array, elsewhere)):
        try:
            jax.block_until_ready(jaxcomm.reshard(given if LAST else array, to))
            texts.append("")
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            texts.append(str(error))
        for _ in range(1 + (given is not deleted)):
            resharding.check(jaxcomm.reshard(array, target), x, target)
    return {"texts": texts}


def gone():
    """The process of all destinations dies, and that of all sources donates."""
    givers, takers = halves()

    def move(x):
        array = resharding.place(resharding.values((8, 8), np.float32, 1), over(givers, P("a")))
        jaxcomm.reshard(array, over(takers, P("a")))
        if LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            jaxcomm.reshard([array], over(takers, P(None, "a")), donate=True)
        finally:
            assert not array.is_deleted()

    return failing(move)


print(json.dumps(globals()[sys.argv[1]]()), flush=True)
if sys.argv[1] == "gone":
    os._exit(0)  # nobody waits at the end for the peer that is gone
