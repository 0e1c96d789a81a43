"""Programs that outlive the process which compiled them: export, serialized executables, the compilation cache.

Guards against custom calls that work only in the process that lowered them: unregistered targets, attributes that
differ between processes, lost state.
"""

import pickle
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OURS, on_ranks
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm._request import NATIVE

BOTH = ("node", "gpu")


def ragged(x):
    """An all_to_all without the blocks of rank 0."""
    each, rank = jnp.arange(8), jax.lax.axis_index(BOTH)
    sizes = [jnp.where(sender == 0, 0, x.shape[0] // 8) for sender in (jnp.full(8, rank), each)]
    places = [block * (x.shape[0] // 8) for block in (each, jnp.full(8, rank))]
    return OURS.ragged_all_to_all(x, 0 * x, places[0], sizes[0], places[1], sizes[1], axis_name=BOTH)


def every_op(x):
    return {
        "all_to_all": OURS.all_to_all(x, BOTH, 0, 0, tiled=True),
        "all_gather": OURS.all_gather(x, "gpu", tiled=True),
        "psum": OURS.psum(x, ("gpu", "node")),
        "pmean": OURS.pmean(x, "node"),
        "pmax": OURS.pmax(x, BOTH),
        "pmin": OURS.pmin(x, "gpu"),
        "psum_scatter": OURS.psum_scatter(x, BOTH, tiled=True),
        "ppermute": OURS.ppermute(x, "gpu", [(0, 1), (3, 2)]),
        "pbroadcast": OURS.pbroadcast(x, BOTH, 5),
        "barrier": OURS.barrier(x, BOTH),
        "ragged_all_to_all": ragged(x),
    }


@pytest.fixture
def program(mesh):
    return jax.jit(on_ranks(every_op, mesh), in_shardings=NamedSharding(mesh, P(BOTH)))


def run(script, folder):
    (folder / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


ELSEWHERE = """
    import pickle
    import jax, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    import jaxcomm
    from jax.sharding import NamedSharding, PartitionSpec as P
    jaxcomm.register()
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, want, data = pickle.load(open("program.pickle", "rb"))
    x = jax.device_put(x, NamedSharding(mesh, P(("node", "gpu"))))
    for _ in range(3):
        got = LOAD(x)
        for op, value in want.items():
            np.testing.assert_array_equal(got[op], value, err_msg=op)
    print(len(want))
"""


LOAD = "__import__('jax.experimental.serialize_executable', fromlist=['x']).deserialize_and_load(*data)"


@pytest.mark.parametrize("load", ["jax.export.deserialize(data).call", LOAD], ids=["export", "executable"])
def test_serialized_program_runs_in_another_process(program, rng, tmp_path, load):
    """Nothing of an executable is lowered there, so only register() makes the handlers known."""
    x = rng.integers(-64, 64, (8, 16, 3)).astype(np.float32)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if load == LOAD:
        data = serialize_executable.serialize(program.lower(shape).compile())
    else:
        checks = [jax.export.DisabledSafetyCheck.custom_call(f"jaxcomm_{name}") for name in set(NATIVE.values())]
        data = jax.export.export(program, disabled_checks=checks)(shape).serialize()
    want = jax.tree.map(np.asarray, program(x))
    (tmp_path / "program.pickle").write_bytes(pickle.dumps((x, want, data)))
    assert run(ELSEWHERE.replace("LOAD", load), tmp_path) == [str(len(want))]


CACHED = """
    import jax, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", "cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    import jaxcomm
    from jax.sharding import PartitionSpec as P
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    def body(x):
        return jaxcomm.psum(x, "i") + jaxcomm.all_to_all(x, "i", 0, 0, tiled=True)
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    x = np.arange(64, dtype=np.float32)
    blocks = x.reshape(8, 8)
    for _ in range(3):
        np.testing.assert_array_equal(f(x), (blocks.T + blocks.sum(0)).reshape(-1))
    print(events.count("/jax/compilation_cache/cache_hits"), events.count("/jax/compilation_cache/cache_misses"))
"""


def test_second_process_hits_the_compilation_cache(tmp_path):
    """Lowering is the same in every process, and a cached executable finds its handlers."""
    hits, misses = run(CACHED, tmp_path)
    assert hits == "0" and int(misses) > 0
    assert run(CACHED, tmp_path) == [misses, "0"]
