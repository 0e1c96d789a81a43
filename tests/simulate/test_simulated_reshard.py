"""Reshards in the simulator: the time of the busiest port where transfers share no link, and more where they do."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomm import RankSharding
from jaxcomm.simulate import Cluster, cli, collective

SHAPE = (8192, 8192)
CASES = [
    # mesh, first rank and spec of both sides; ranks of a node; the busiest port of the network, in parts of the array
    ((2, 4), 0, P("a", "b"), (8,), 8, P(None, "a"), 8, 1 / 8),  # the other node gets all
    ((16,), 0, P("a"), (16,), 0, P(None, "a"), 8, 1 / 32),  # half of a shard
    ((8,), 0, P("a"), (8,), 0, P(None, "a"), 2, 6 / 64),
    ((2,), 0, P("a"), (6,), 2, P("a"), 2, 1 / 2),  # two ranks send all
    ((6,), 0, P("a"), (2,), 6, P("a"), 2, 1 / 2),  # two ranks receive all
]


def sharding(mesh, first, spec):
    return RankSharding(first + np.arange(np.prod(mesh)).reshape(mesh), "ab"[: len(mesh)], spec)


@pytest.mark.parametrize(("old", "at", "spec", "new", "to", "wanted", "node", "part"), CASES)
def test_a_uniform_network_takes_the_time_of_the_busiest_port(old, at, spec, new, to, wanted, node, part):
    uniform = {"nvlink.ranks": str(node), "leaf.kind": "fat_tree"}  # every rank has a port, and all ports are joined
    cluster = Cluster.load("dgx-h100", uniform)
    sides = sharding(old, at, spec), sharding(new, to, wanted)
    n = 1 + max(side.ranks.max() for side in sides)
    x = jax.ShapeDtypeStruct(SHAPE, "float32")
    found = collective("reshard", x, int(n), cluster=cluster, shardings=sides, algorithm="direct")
    port_s = part * np.prod(SHAPE) * 4 / cluster.levels[1].bytes_per_s
    assert found.bound_beta_s == pytest.approx(port_s, rel=1e-3)
    assert port_s < found.time_s < 1.3 * port_s


def test_a_broken_link_delays_the_move():
    sides = sharding((8,), 0, P("a")), sharding((8,), 8, P(None, "a"))
    x = jax.ShapeDtypeStruct(SHAPE, "float32")
    times = []
    for faults in ({}, {"fault.leaf[11]": "0.25"}):
        cluster = Cluster.load("dgx-h100", faults)
        times.append(collective("reshard", x, 16, cluster=cluster, shardings=sides).time_s)
    assert 3 < times[1] / times[0] < 4.1
    with pytest.raises(ValueError, match="reshard: fidelity 'bounds' and lost ranks are not for shardings"):
        collective("reshard", x, 16, cluster=Cluster.load("dgx-h100", {"fault.rank[1]": "lost"}), shardings=sides)


def test_the_command_prints_the_move(capsys):
    arguments = ["--shape=4096,4096", "--cluster=dgx-h100"]
    assert cli.main(["reshard", "data=2,model=4:data,model", "model=4,data=2@8:,model+data", *arguments]) == 0
    assert "reshard of 8388608 bytes per rank among 16 ranks on DGX H100" in capsys.readouterr().out
    assert cli.main(["reshard", "a=2:b", "a=2:a", *arguments]) == 2
    assert "source must name each axis of ('a',) at most once" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["reshard", "2x4", "a=2:a", *arguments])
    assert "expected MESH:SPEC such as" in capsys.readouterr().err
