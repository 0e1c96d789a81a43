"""step_of_hlo(profiled=...): times of kernels from a trace of jax.profiler, made on CPU devices and by hand."""

import gzip
import json
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomm.simulate import Cluster, StepError, cli, step_of_hlo
from jaxcomm.simulate.step import profile

H100 = Cluster.load("dgx-h100")
TEXT = """HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64] parameter(0)
  %one = f32[64,64] negate(%p)
  %r = f32[64,64] all-reduce(%one), channel_id=1, use_global_device_ids=true, replica_groups={}, to_apply=%add
  ROOT %two = f32[64,64] dot(%r, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def _event(op, duration, name=None, module="jit_f", program=1):
    arguments = {"hlo_op": op, "hlo_module": module, "program_id": program}
    return {"ph": "X", "pid": 1, "tid": 2, "ts": 0, "dur": duration, "name": name or op, "args": arguments}


def _write(path, events):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return str(path)


def test_a_profile_of_this_machine(tmp_path):
    """A loop of a product and a sum: medians of the trace, three times each, with collectives of the cluster."""
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))

    def f(x, w):
        def layer(h, _):
            return jnp.tanh(jax.lax.psum(h @ w, "d")), None

        return jax.lax.scan(layer, x, length=3)[0]

    x = jnp.ones((256, 256))
    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    compiled = run.lower(x, x).compile()
    compiled(x, x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            compiled(x, x).block_until_ready()
    [path] = tmp_path.rglob("*.trace.json.gz")
    text = compiled.as_text()
    found = step_of_hlo(text, cluster=H100, mesh={"d": 4}, profiled=str(path))
    plain = step_of_hlo(text, cluster=H100, mesh={"d": 4})
    durations: dict[str, dict[str, list[float]]] = {}  # by instruction and device
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if "hlo_op" in event.get("args", {}):
            device = f"{event['pid']} {event['args'].get('device_ordinal')}"
            durations.setdefault(event["args"]["hlo_op"], {}).setdefault(device, []).append(event["dur"])
    count = {name: sum(map(len, own.values())) for name, own in durations.items()}
    median = {name: statistics.median(map(statistics.median, own.values())) for name, own in durations.items()}
    body = [median[name] for name in durations if count[name] == 2 * 4 * 3 and "psum" not in name]
    once = [median[name] for name in durations if count[name] == 8 and "while" not in name]
    # Arithmetic of scalars, such as the loop's counter, is no kernel.
    assert max(3 * max(body), sum(body)) * 1e-6 <= found.compute_s <= (3 * sum(body) + sum(once)) * 1e-6 * (1 + 1e-9)
    assert found.communication_s == pytest.approx(plain.communication_s) and found.flops == plain.flops
    assert [(c.op, c.count) for c in found.collectives] == [("psum", 3)]


def test_kernels_of_an_instruction_add_up(tmp_path):
    """`two` starts a kernel twice and another once in each of two executions, on two devices; medians, not means."""
    events = [_event("one", d) for d in (10, 10, 11, 900)]
    events += [_event("two", 3, "split") for _ in range(8)] + [_event("two", 5, "join") for _ in range(4)]
    events += [_event("two", 7, module="jit_other"), _event("r", 10**6), {"ph": "M", "name": "process_name"}, "text"]
    path = _write(tmp_path / "t.json.gz", events)
    found = step_of_hlo(TEXT, cluster=H100, profiled=path)
    assert found.compute_s == pytest.approx((10.5 + 2 * 3 + 5) * 1e-6)
    assert found.time_s == pytest.approx(found.compute_s + found.communication_s) and found.communication_s < 1e-4
    assert "measured times" in found.why
    assert "Kernels have measured times." in str(found) and "no measurement of a step" not in str(found)
    assert "rests on no measurement of a step" in str(step_of_hlo(TEXT, cluster=H100))


@pytest.mark.parametrize(
    ("events", "microseconds"),
    [
        ([_event("one", 10, "gemm")] * 100 + [_event("one", 10, "memset")], 10.1),
        ([_event("one", 10, "gemm")] * 8 + [_event("one", 8, "cut")], 11),
        ([_event("one", 3, "sort")] * 32 + [_event("one", 5, "count")] * 8 + [_event("one", 7, "sum")] * 8, 24),
        ([_event("one", 10, "a")] * 8 + [_event("one", 12, "b") | {"pid": 2}] * 8, 11),
        ([_event("one", 10)] * 6 + [_event("one", 10) | {"pid": 2}] * 2 + [_event("one", 40) | {"pid": 3}], 10),
    ],
)
def test_executions_are_counted_on_each_device(tmp_path, events, microseconds):
    """Rare and cut kernels do not multiply the time, and devices may have kernels of other names."""
    assert profile.times(_write(tmp_path / "t.json.gz", events), "jit_f") == {"one": pytest.approx(microseconds * 1e-6)}


def test_a_kernel_without_a_time_keeps_its_roofline(tmp_path):
    found = step_of_hlo(TEXT, cluster=H100, profiled=_write(tmp_path / "t.json", [_event("one", 10)]))
    plain = step_of_hlo(TEXT, cluster=H100)
    dot = next(run for run in plain.timeline.runs if getattr(run.task.work, "flops", 0))
    assert found.compute_s == pytest.approx(10e-6 + dot.end_s - dot.start_s)
    assert any("has no time of a kernel" in note and "1 place" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "t.json: not a trace of jax.profiler"),
        (b"\x1f\x8bno", "t.json: not a trace of jax.profiler"),
        (b"{}", "t.json: not a trace of jax.profiler: KeyError"),
        (b'{"traceEvents": 3}', "traceEvents is no list"),
        (b'{"traceEvents": []}', "no event of the module jit_f; no event names an instruction"),
        (json.dumps([_event("one", 1, module="jit_g")]).encode(), "no event of the module jit_f; it has jit_g"),
        (json.dumps([_event("one", "x")]).encode(), "event 0: dur: got 'x', expected microseconds"),
        (json.dumps([_event("one", True)]).encode(), "event 0: dur: got True, expected microseconds"),
        (json.dumps([_event("one", 1, program=n) for n in (3, 7)]).encode(), "2 programs have the name jit_f .*3, 7"),
        (json.dumps([_event("nine", 1)]).encode(), "no event is an instruction of HLO"),
    ],
)
def test_bad_profiles_name_the_file(tmp_path, content, message):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(StepError, match=message):
        step_of_hlo(TEXT, cluster=H100, profiled=str(tmp_path / "t.json"))


def test_the_command_takes_a_profile(tmp_path, capsys):
    (tmp_path / "x.hlo").write_text(TEXT)
    path = _write(tmp_path / "t.json.gz", [_event("one", 5000), _event("two", 6000)])
    command = ["step", "--cluster", "dgx-h100", "--json", "--profile", path]
    assert cli.main([*command, "--hlo", str(tmp_path / "x.hlo")]) == 0
    assert json.loads(capsys.readouterr().out)["compute_s"] == pytest.approx(11e-3)
    assert cli.main([*command, "x.py:f"]) == 2
    assert "--profile needs --hlo" in capsys.readouterr().err
