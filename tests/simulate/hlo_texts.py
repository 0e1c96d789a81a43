"""HLO texts of one entry computation on eight devices."""

import jax
import numpy as np

from jaxcomm.simulate.step import hlo, hlo_text

SIZES = {"data": 2, "model": 4}
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), tuple(SIZES))
HEAD = "HloModule m, is_scheduled=true, num_partitions=8\n"
ADD = "\n%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n"  # noqa: E501
GLOBAL = "channel_id=1, use_global_device_ids=true"
P0 = "%p = bf16[1024,1024]{1,0} parameter(0)"
REDUCE = f"ROOT %r = bf16[1024,1024] all-reduce(%p), {GLOBAL}, replica_groups={{}}, to_apply=%add"


def text(*lines, more=ADD):
    return HEAD + more + "\nENTRY %main (p: bf16[1024,1024]) -> bf16[1024,1024] {\n" + "\n".join(lines) + "\n}\n"


def block(*lines, more=ADD):
    module = hlo_text.parse(text(*lines, more=more), "x.hlo")
    reader = hlo._Reader(module, SIZES, 1)
    return reader, reader.block(module.entry)
