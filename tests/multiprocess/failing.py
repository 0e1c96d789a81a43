"""Programs with failures; tests run them in several processes: failing.py <scenario>...

These tests use one host; tests/hosts/test_host_failures.py uses two. The last process fails, or process VICTIM. Each
process prints one JSON object per line: an event and its time (time.monotonic(), common to all processes of a machine).
"""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import resource
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import meshes_failing
import moe_failing
import numpy as np
import recorder_failing
import reshard_failing
from attempts import SHORT_S, VICTIM, attempt, kill, limit, others_are_late, program, say, stop
from jax import lax
from jax.sharding import PartitionSpec as P
from sockets import acknowledged_bytes, listening_ports

import jaxcomm
from jaxcomm._processes import bootstrap, kv_store

if "STARTED" in os.environ:  # every sum is started and done
    jaxcomm.psum = lambda x, axis: jaxcomm.psum_start(x, axis).done(after=x * 2)
SCENARIOS = {"meshes_of_different_devices": meshes_failing.meshes_of_different_devices, **recorder_failing.SCENARIOS}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def psum(x):
    return jaxcomm.psum(x, "i")


def victim_does(action, victim=VICTIM, op=psum):
    """op; the victim first runs action() in the middle of the program."""
    first, turn = threading.Lock(), threading.Lock()  # of the devices

    def act(_):
        if jax.process_index() == victim:
            if first.acquire(blocking=False):
                say("acts")
                action()
        elif action is stop:
            with turn:
                if first.acquire(blocking=False):
                    others_are_late()
        return np.float32(0)

    def culprit(x):
        x = op(x)  # all have come so far
        return op(x + jax.pure_callback(act, jax.ShapeDtypeStruct((), np.float32), x[0, 0]))

    return program(culprit)


@scenario
def killed_in_a_collective(op=psum):
    attempt(victim_does(kill, op=op))
    survivors_work()


SCENARIOS["killed_in_one_shot"] = lambda: killed_in_a_collective(moe_failing.one_shot)
SCENARIOS["killed_in_a_call_of_others"] = lambda: killed_in_a_collective(meshes_failing.two_groupings)


def survivors_work():
    """The other processes form a group."""
    works([p for p in range(jax.process_count()) if p != VICTIM])
    say("survivors work")


def works(processes):
    """Runs twice, because later messages may fail even if the first ones after a failure succeed."""
    run = program(psum, processes)
    run()
    result = run()
    rows = np.arange(8.0 * sum(d.process_index in processes for d in jax.devices())).reshape(-1, 8)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data)[0], rows.sum(0))


@scenario
def tampered_routings():
    for arguments in moe_failing.TAMPERED:
        attempt(program(functools.partial(moe_failing.tampered, **arguments)))
        works_again()


@scenario
def killed_between_collectives():
    run = program(psum)
    run()
    if jax.process_index() == VICTIM:
        time.sleep(0.5)  # otherwise pending messages of the first collective are lost with the process
        say("acts")
        kill()
    time.sleep(1)
    attempt(run)
    attempt(run)  # again: at once
    survivors_work()


@scenario
def one_after_the_other_is_killed():
    """The last process ends in the middle of a program, then the first one between two programs."""
    attempt(victim_does(kill, jax.process_count() - 1))
    works([0, 1])
    say("survivors work")
    run = program(psum, [0, 1])
    run()
    sys.stdin.readline()  # until all have come so far
    if jax.process_index() == 0:
        say("acts")
        kill()
    sys.stdin.readline()  # until it has ended
    attempt(run)
    attempt(run)  # again: at once
    works([1])
    say("survivors work")


@scenario
def killed_during_bootstrap():
    if jax.process_index() == VICTIM:
        say("acts")
        kill()
    bootstrap.read_records(p for p in range(jax.process_count()) if p != VICTIM)
    limit(SHORT_S)
    attempt(lambda: program(psum)())
    survivors_work()


@scenario
def coordinator_killed_during_bootstrap():
    time.sleep(0.1)  # the others have the message that all are there
    if jax.process_index() == VICTIM:
        say("acts")
        kill()
    for processes in None, [1, 2]:
        limit(SHORT_S)
        attempt(lambda processes=processes: program(psum, processes)())


def large_data_move():
    """Moves large data in a loop, until a peer fails."""
    x = jnp.ones((1 << 22,), jnp.float32)

    def body(block):
        def step(i, total):
            return jaxcomm.psum(total, "i") / jax.device_count()

        return lax.fori_loop(0, 10000, step, x + block[0, 0])[None, :8]

    return program(body)


@scenario
def stopped_while_reshard_runs():
    def late():
        others_are_late()
        before = len(reshard_failing.ROUNDS)
        while SHORT_S and len(reshard_failing.ROUNDS) == before:
            time.sleep(0.01)  # the waits of this round have begun without the limit
        say("has a limit")

    run = reshard_failing.resharding_runs()
    acts_while(run, lambda: os.kill(os.getpid(), signal.SIGSTOP), late)


def acts_while(run, action, before=lambda: None):
    """The victim acts after a second of the run, which fails in all processes."""

    def act():
        before()
        if jax.process_index() == VICTIM:
            if SHORT_S:
                sys.stdin.readline()  # until all have their limit
            say("acts")
            action()

    threading.Timer(1.0, act).start()
    attempt(run)


def killed_while(run):
    acts_while(run, kill)
    survivors_work()


SCENARIOS |= {
    "killed_while_reshard_runs": lambda: killed_while(reshard_failing.resharding_runs()),
    "killed_while_large_data_move": lambda: killed_while(large_data_move()),  # processes read the victim's memory
    # SIGSTOP; the parent sends SIGCONT when the others have failed.
    "stopped": lambda: attempt(victim_does(stop)),
    "stopped_in_one_shot": lambda: attempt(victim_does(stop, op=moe_failing.one_shot)),
}


@scenario
def works_again():
    """Runs after other scenarios, which leave all processes alive."""
    sys.stdin.readline()  # until all have failed
    works(range(jax.process_count()))
    say("works again")


@scenario
def stopped_while_its_data_lands():
    """SIGSTOP of the sender, with a large payload on its way straight into a result. SIGCONT comes from the parent."""
    blocks = jax.device_count(), 1 << 22  # each in one message
    send = program(
        lambda x: jaxcomm.all_to_all(jnp.broadcast_to(x[0, 0], blocks), "i", 0, 0, algorithm="direct")[:1, :8]
    )
    send()  # compiled, and quick the next time
    program(psum)()  # all has arrived
    if jax.process_index() == VICTIM:

        def run():  # whether the sender gets an error depends on timing: it waits for no data
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                send()

        before = acknowledged_bytes()
        sender = threading.Thread(target=run)
        sender.start()
        while acknowledged_bytes() - before < 1 << 22:
            time.sleep(1e-3)
        say("acts")
        stop()
        sender.join()
    else:
        limit(SHORT_S)
        attempt(send)
    attempt(program(psum))
    works([jax.process_index()])
    say("each works alone")


def own_host():
    """The processes of this node."""
    return next(node for node in jaxcomm.topology().nodes if jax.process_index() in node)


def works_after_the_cut():
    works(own_host())
    say("host works")
    sys.stdin.readline()  # until the link is there again
    works(range(jax.process_count()))
    say("works again")


def link_cut_while(make):
    def late():
        say("runs")
        others_are_late()
        time.sleep(2)  # the waits that have begun without the limit end
        say("ready")

    program(psum)()
    works(own_host())
    threading.Timer(1.0, late).start()
    attempt(make())
    works_after_the_cut()


SCENARIOS |= {
    "link_cut_while_large_data_move": lambda: link_cut_while(large_data_move),
    "link_cut_while_reshard_runs": lambda: link_cut_while(reshard_failing.resharding_runs),
}


@scenario
def link_cut_between_collectives():
    run = program(psum)
    run()
    say("ready")
    sys.stdin.readline()  # until the link is cut
    for _ in range(2):
        limit(SHORT_S)
        attempt(run)
    works_after_the_cut()


def first_half():
    return jax.process_index() < jax.process_count() // 2


@scenario
def watched_by_strangers():
    """Runs collectives and checks their values, until the parent ends it."""
    own, processes = jax.process_index(), range(jax.process_count())
    works(processes)
    address = kv_store.client().blocking_key_value_get(f"jaxcomm/network/{own}", 1000)
    say("listens", ports=listening_ports(), address=address)
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), done.set()), daemon=True).start()
    rows, run = np.arange(8.0 * jax.device_count()).reshape(-1, 8), program(lambda x: jaxcomm.pmax(x, "i"))
    rounds, last = 0, False
    while not last:
        # All processes stop in the same iteration.
        rows[:, 0] = done.is_set()
        for shard in run(rows).addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data)[0, 1:], rows[-1, 1:])
            last = bool(np.asarray(shard.data)[0, 0])
        numbers = reshard_failing.place_numbers()
        for shard in reshard_failing.resharded(numbers, P(None, "i")).addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), reshard_failing.NUMBERS[shard.index])
        rounds += 1
        time.sleep(0.02)  # leaves processors to the strangers
    say("right", rounds=rounds)


@scenario
def has_another_token():
    """Acts as processes 0 and 1 of another program, and sends messages to the processes at REAL_ADDRESSES."""
    real, fetch = json.loads(os.environ["REAL_ADDRESSES"]), kv_store.kv_get_of_process

    def forged(key, process):
        return real[process] if key == "network" else fetch(key, process)

    kv_store.kv_get_of_process = forged
    attempt(lambda: program(psum)())
    x = jnp.ones((1, 1 << 18), jnp.float32)
    attempt(lambda: program(lambda block: jaxcomm.psum(x + block[:, :1], "i")[:, :8])())
    attempt(lambda: jax.block_until_ready(reshard_failing.resharded(reshard_failing.place_numbers(), P(None, "i"))))


def moe_layer(tokens=2, **algorithms):
    numbers = {"choices": 2, "experts_per_rank": 2, "dtype": jnp.float32, "capacity": 64}
    return functools.partial(moe_failing.layer, tokens=tokens, **numbers, **algorithms)


def both(x, ops):
    return ops[1](ops[0](x, "i"), "i")


# One body for the first half of the processes, and one for the others.
for name, bodies in {
    "different_ops": (psum, lambda x: jaxcomm.pmax(x, "i")),
    "different_shapes": (psum, lambda x: jnp.resize(psum(x[:, :4]), (1, 8))),
    "different_dtypes": (psum, lambda x: psum(x.astype(np.int32))),
    "different_algorithms": [lambda x, a=a: jaxcomm.psum(x, "i", algorithm=a) for a in ("ring", "direct")],
    "different_tokens": [moe_layer(tokens=tokens, algorithm="direct") for tokens in (3, 4)],
    "different_algorithms_of_route_and_dispatch": [moe_layer(algorithm=a) for a in ("one_shot", "direct")],
    "different_algorithms_of_combine": [moe_layer(algorithm="direct", combine=a) for a in ("direct", None)],
    "different_orders": [functools.partial(both, ops=o) for o in itertools.permutations([jaxcomm.psum, jaxcomm.pmax])],
    "different_trip_counts": [lambda x, n=n: lax.fori_loop(0, n, lambda i, x: psum(x), x) for n in (3, 4)],
}.items():
    SCENARIOS[name] = lambda bodies=bodies: attempt(program(bodies[not first_half()]))


@scenario
def different_numbers_of_runs():
    run = program(psum)
    for number in range(3 - jax.process_index()):
        if number == 2:
            others_are_late()
        attempt(run)


@scenario
def another_version():
    if jax.process_index() == 1:
        importlib.metadata.version = lambda name: "99.0"
    attempt(lambda: program(psum)())


@scenario
def no_descriptors_left():
    """The kernel allocates no more shared memory."""
    program(psum)()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if jax.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    attempt(program(lambda x: jaxcomm.psum(jnp.ones((1, 1 << 22)) * x[:, :1], "i", algorithm="ring")[:, :8]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_recoverability", True)  # else JAX itself ends the survivors
    initialize = jaxcomm.distributed.initialize if VICTIM == 0 else jax.distributed.initialize
    initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    )
    jax.devices()  # JAX's own exit waits for minutes
    kv_store.client().wait_at_barrier("back ends are up", 100_000)
    for name in sys.argv[1:]:
        SCENARIOS[name]()
    say("end")
    sys.stdin.readline()  # until all have come so far
    (sys.exit if VICTIM == 0 else os._exit)(0)  # at exit, JAX waits for dead processes
