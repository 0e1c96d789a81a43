"""tools.simulator: fits find the parameters that made a table, residuals and intervals hold on rows left out."""

import made
import numpy as np
import pytest

from jaxcomm._measure import least_squares
from jaxcomm.simulate.nccl import hardware
from tools.simulator import holdouts, intervals, parameters
from tools.simulator.fit import fit
from tools.simulator.priors import PRIORS

SIZES = [2**k for k in range(10, 34, 2)]
DENSE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
TRUTH = {
    "launch": 9.0, "lambda_ll": 1.3, "lambda_ll128": 2.6, "lambda_simple": 7.0,
    "share_ll": 0.35, "share_ll128": 0.7, "share_simple": 0.85, "self": 0.2,
    "tree_inner": 4.0, "tree_outer": 2.5, "share_tree": 0.5, "nvls": 150.0, "share_nvls": 0.6,
    "per_peer": 0.4, "host_start": 12.0, "rendezvous": 9.0, "channel_ll": 5.5, "channel_simple": 22.0,
    "share_peer": 0.75,
}  # fmt: skip


def _domain(path, noise=0.0, seed=0):
    return made.timed(path, made.sweep(DENSE, (4, 8, 18, 36, 72), SIZES), TRUTH, noise, seed)


@pytest.mark.deadline(60)
def test_a_fit_finds_the_parameters_that_made_the_table(tmp_path):
    fitted = fit(_domain(tmp_path / "t.csv", noise=0.01))
    (system,) = fitted.systems.fitted.values()
    for name, value in TRUTH.items():
        if system.identified[name] > 0.9:
            assert system.parameters[name] == pytest.approx(value, rel=0.2), name
    known = [name for name in TRUTH if system.identified[name] > 0.9]
    assert {"launch", "lambda_ll", "share_ll", "channel_simple", "share_simple"} <= set(known) and len(known) >= 12


def test_parameters_without_data_stay_at_their_prior(tmp_path):
    rows = made.sweep(["collective_permute"], [72], SIZES)
    (system,) = fit(made.timed(tmp_path / "t.csv", rows, TRUTH)).systems.fitted.values()
    assert system.identified["channel_simple"] > 0.9 and system.identified["nvls"] < 0.1
    assert system.parameters["nvls"] == pytest.approx(PRIORS["domain"]["nvls"].center, rel=1e-3)


def test_the_optimum_of_a_line_is_least_squares_with_a_prior():
    """Small errors: soft L1 is quadratic, so that normal equations give the answer. The last parameter has no data."""
    random = np.random.default_rng(0)
    a, target = random.normal(size=(20, 3)) * [1, 1, 0], 1e-4 * random.normal(size=20)
    mean, spread = 1e-4 * np.ones(3), np.array([0.1, 1.0, 10.0])
    found = least_squares.minimize(lambda t: a @ t, target, mean, spread, np.array([0, 1e-3, 1e-18]))
    precision, weight = np.diag(1 / spread**2), 1 / least_squares.SCALE**2
    expected = np.linalg.solve(weight * a.T @ a + precision, weight * a.T @ target + precision @ mean)
    np.testing.assert_allclose(found.theta, expected, atol=1e-7)
    inverse = np.linalg.inv(weight * a.T @ a + precision)
    np.testing.assert_allclose(found.variance, np.diag(inverse), rtol=1e-2)


KERNEL = {"note": "lib=MSCCL++; algo=one"}
NAMED = {
    "nccl": [
        ({"bytes": "8192", "ranks": "8"}, "between"),
        ({"bytes": "1073741824", "ranks": "8"}, "beyond"),
        ({"ranks": "6"}, "scale"),
        ({"ranks": "64"}, "larger"),
        ({"op": "all_to_all"}, "op"),
        ({"source": "other/sweep:file"}, "harness"),
        ({"hardware": "GB300 NVL72"}, "harness"),
        ({"hardware": "8x H100"}, "device"),
        ({"hardware": "8x MI300X", "note": "lib=RCCL"}, "guess"),
        ({"note": "lib=MSCCL++"}, "guess"),
    ],
    "kernel": [  # from the same kernel only
        ({**KERNEL, "bytes": "8192"}, "between"),
        ({**KERNEL, "source": "other/sweep:file"}, "harness"),
        ({**KERNEL, "op": "all_gather"}, "guess"),
        ({"note": "lib=UCCL"}, "guess"),
    ],
}


@pytest.mark.parametrize("table", NAMED)
def test_a_prediction_names_what_it_rests_on(tmp_path, table):
    if table == "nccl":
        rows = made.timed(tmp_path / "t.csv", made.sweep(DENSE[:3], (4, 8), [2**k for k in range(12, 24, 2)]), TRUTH)
    else:
        rows = made.read(tmp_path / "t.csv", [{**KERNEL, "bytes": str(b), "time_us": str(5 + b / 1e5)} for b in SIZES])
    found = fit(rows).predict(made.read(tmp_path / "q.csv", [row for row, _ in NAMED[table]]))
    assert list(found.evidence) == [evidence for _, evidence in NAMED[table]]
    assert np.isfinite(found.log_time).all()


@pytest.mark.parametrize(
    ("hold_out", "evidence", "share"),
    [("scale", "scale", 0.8), ("operation", "op", 0.8), ("larger", "larger", 0.94), ("harness", "harness", 0.94),
     ("system", "device", 0.94)],
)  # fmt: skip
def test_intervals_of_hold_outs_hold_their_share(hold_out, evidence, share):
    """Errors 0 to 1 in steps of 0.001. Hold-outs of whole machines, with few of them, have wider intervals.

    Two halves have the same errors. Each is predicted from the other, so the coverage is the share.
    """
    half = np.arange(1001) / 1000
    error, part = np.concatenate([half, half]), np.repeat([0, 1], 1001)
    index, sizes = np.arange(2002), np.full(2002, 2.0**21)
    names = np.full(2002, evidence, dtype=object)
    held_out = holdouts.HeldOut(hold_out, index, part, error, error, names, np.full(2002, np.nan), ())
    found = intervals.calibrate(tuple(np.zeros((4, 0))), {hold_out: held_out}, sizes)
    edges = np.array([2**16 - 1, 2**16, 2**20, 2**26 - 1, 2**26])  # an edge belongs to the larger sizes
    assert intervals.size_range(edges).tolist() == [0, 1, 2, 2, 3]
    assert found.quantiles[evidence] == [pytest.approx((0.5 - share / 2, 0.5 + share / 2))] * 4
    assert intervals.coverage(held_out, sizes) == pytest.approx(share, abs=0.002)


def test_stored_parameters_predict_the_same(tmp_path):
    source = _domain(tmp_path / "t.csv", noise=0.1)
    fitted = parameters.fitted_to(source, "made", with_hold_outs=False)
    parameters.save(tmp_path / "f.json", parameters.plain(fitted))
    asked = made.read(tmp_path / "q.csv", [*made.sweep(DENSE, (4, 8, 64), [3000, 3 * 2**20]), {"hardware": "8x H100"}])
    before, after = fitted.model.predict(asked), parameters.load(tmp_path / "f.json").model.predict(asked)
    np.testing.assert_allclose(before.log_time, after.log_time, atol=2e-4)
    assert list(before.evidence) == list(after.evidence)


def test_a_hold_out_never_fits_what_it_predicts(tmp_path):
    """Families left out take their sisters along."""
    rows = [
        {**row, "hardware": name, "interconnect": wire, "ranks_per_node": "8", "source": source}
        for name, wire, source in (
            ("8x H100", "NVLink4", "a/b:c"),
            ("8x H200", "NVLink4", "d/e:f"),
            ("8x B200", "NVLink5", "a/b:c"),
        )
        for row in made.sweep(DENSE, (2, 4, 8), SIZES)
    ]
    source = made.read(tmp_path / "t.csv", rows)
    seen = set()
    for name, parts in holdouts.HOLD_OUTS.items():
        for part in parts(source):
            seen.add(name)
            assert part.test.any() and not (part.train & part.test).any(), name
            again = next(p for p in parts(source) if p.name == part.name)
            np.testing.assert_array_equal(part.test, again.test)
            if name in ("system", "system-6-points"):
                kept = {hardware.device(source.rows[i].hardware).name for i in np.flatnonzero(part.train)}
                assert kept == {"B200"} if name == "system" and "H" in part.name.split(", ")[1] else kept
    assert seen == {"points", "scale", "operation", "system", "system-6-points"}
    six = next(holdouts.one_system(source, keep_points=True))
    assert (six.train & np.array([row.hardware == "8x H100" for row in source.rows])).sum() == 6
