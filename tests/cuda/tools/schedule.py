"""Compiles programs with start and done for an H100, with JAX's CUDA plugin and no GPU, and checks XLA's schedules.

    pip install --no-deps --target FOLDER jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION  # of the installed jax
    JAX_PLATFORMS=cpu PYTHONPATH=FOLDER python tests/cuda/tools/schedule.py

XLA stops after the schedule: jaxcomm's handlers are not registered, and there may be no assembler for its kernels. Its
process may also crash then, so each program has a process of its own. Exit status 1: the schedule of a program is not
the expected one of this version.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

FLAGS = "--xla_gpu_autotune_level=0 --xla_dump_hlo_as_text --xla_dump_to="

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version { major: 13 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def schedule(dump: pathlib.Path, computation: str) -> list[str]:
    """What a computation of the compiled program does, in order: start, done, product, call of the synchronous lane."""
    (path,) = dump.glob("*gpu_after_optimizations.txt")
    text = re.search(rf"^{computation}.*?^\}}", path.read_text(), re.M | re.S)
    assert text, f"no {computation} in {path}"
    kinds = {
        "start": r"call-start\S* = ",
        "done": r"call-done\S* = ",
        "product": r"gemm_fusion_dot\S* = |cublas",
        "synchronous": r'custom_call_target="jaxcomm_(?!done)',
    }
    lines = text[0].splitlines()
    return [kind for line in lines for kind, pattern in kinds.items() if re.search(pattern, line)]


def main(*only: str) -> int:
    """Compiles the program `only`, or all of them in processes of their own."""
    os.environ["JAXCOMM_ALGORITHM"] = "plans"

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcomm
    from jaxcomm._processes import placement

    placement.gpu_groups = lambda mesh, rows: np.zeros(2 * rows.size, np.int32)  # no keys of NCCL's
    shape = "1x1x8" if jax.__version_info__ >= (0, 12) else "1 x 1 x 8"
    gpus = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology=shape).devices
    mesh = Mesh(np.array(gpus), ("gpu",), axis_types=(AxisType.Auto,))

    def straight(x, w):
        """A gather that starts after tanh and hides behind two products."""
        a = jnp.tanh(x)
        pending = jaxcomm.all_gather_start(x, "gpu", tiled=True, after=a)
        y = jnp.tanh(a @ w[0]) @ w[0]
        z = pending.done(after=y)
        return jnp.tanh(z[: y.shape[0]] @ w[0]) + y

    def loop(x, w):
        """The gather of the next layer's weights, beside a product and a synchronous sum."""

        def layer(carry, following):
            x, own = carry
            pending = jaxcomm.all_gather_start(following, "gpu", tiled=True, after=x)
            y = jnp.tanh(x @ own)
            y = y + jaxcomm.psum(y[:8], "gpu").sum()
            return (y, pending.done(after=y)), None

        return jax.lax.scan(layer, (x, jaxcomm.all_gather(w[0], "gpu", tiled=True)), w)[0][0]

    def parameter(x, w):
        """The gather of a parameter of the program."""
        pending = jaxcomm.all_gather_start(x, "gpu", tiled=True)
        y = jnp.tanh(x @ w[0]) @ w[0]
        return jnp.tanh(pending.done(after=y)[: y.shape[0]] @ w[0]) + y

    def after_weights(x, w):
        """The gather waits for a parameter."""
        pending = jaxcomm.all_gather_start(x, "gpu", tiled=True, after=w)
        y = jnp.tanh(x @ w[0]) @ w[0]
        return jnp.tanh(pending.done(after=y)[: y.shape[0]] @ w[0]) + y

    def part(x, w):
        """The operand is a part of a parameter, so a kernel makes it."""
        pending = jaxcomm.psum_start(w[1], "gpu")
        y = jnp.tanh(x @ w[0]) @ w[0]
        return jnp.tanh(y @ pending.done(after=y)) + y

    def cast(x, w):
        """The operand has been converted to another type."""
        pending = jaxcomm.psum_start(w[1].astype(jnp.bfloat16), "gpu")
        y = jnp.tanh(x @ w[0]) @ w[0]
        return jnp.tanh(y @ pending.done(after=y).astype(jnp.float32)) + y

    def gradient(x, w):
        """The operand is a product, as the gradient of a weight is."""
        pending = jaxcomm.psum_start(x.T @ x, "gpu")
        y = jnp.tanh(x @ w[0]) @ w[0]
        return jnp.tanh(y @ pending.done(after=y)) + y

    new = jax.__version_info__ >= (0, 12)
    beside = ["start", "product", "product", "done", "product"]
    # jaxlib 0.10.2 schedules the kernel of an operand late, and the start after it.
    late = ["product", "product", "start", "done", "product"]
    expected = {
        straight: (P(), "ENTRY", beside),
        loop: (P(None, "gpu"), "%region_0", ["start", "product", "synchronous", "done"]),
        parameter: (P(), "ENTRY", beside),
        after_weights: (P(), "ENTRY", beside),
        part: (P(), "ENTRY", beside if new else late),
        cast: (P(), "ENTRY", beside if new else late),
        gradient: (P(), "ENTRY", ["product", *beside] if new else ["product", *late]),
    }
    if only:
        (program,) = (f for f in expected if f.__name__ == only[0])
        of_weights = expected[program][0]
        operands = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in (((32768, 1024), P("gpu")), ((6, 1024, 1024), of_weights))
        ]
        f = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(P("gpu"), of_weights), out_specs=P("gpu"),
                                  check_vma=False))  # fmt: skip
        f.lower(*operands).compile()
        return 0
    status = 0
    for program, (_, computation, order) in expected.items():
        with tempfile.TemporaryDirectory() as dump:
            flags = f"{FLAGS}{dump} {os.environ.get('XLA_FLAGS', '')}"
            done = subprocess.run([sys.executable, __file__, program.__name__], env=os.environ | {"XLA_FLAGS": flags},
                                  capture_output=True, text=True, timeout=600)  # fmt: skip
            if not any(pathlib.Path(dump).glob("*gpu_after_optimizations.txt")):
                print(f"{program.__name__}: no schedule\n{done.stderr}")
                return 1
            found = schedule(pathlib.Path(dump), computation)
        print(f"{program.__name__}: {', '.join(found)}" + ("" if found == order else f"; expected {', '.join(order)}"))
        status |= found != order
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
