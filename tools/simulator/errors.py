"""The table of errors: every hold-out, by range of sizes, warm-up apart, beside baselines and targets."""

import dataclasses
from collections import defaultdict

import numpy as np

from jaxcomm.simulate.nccl.intervals import SIZES, size_range
from tools.simulator import baselines, fit, holdouts, intervals, measured
from tools.simulator.parameters import Fitted
from tools.simulator.table import Table

_MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Line:
    """Errors of some rows; shares are 0 to 1. An error is max(predicted / measured, measured / predicted) - 1."""

    hold_out: str
    rows: str
    count: int
    median: float
    p90: float
    p95: float
    within_25: float
    bias: float  # median of predicted / measured, minus 1
    target: tuple[float, float] | None = None  # of median and p95

    @property
    def met(self) -> bool:
        return self.target is None or (self.median <= self.target[0] and self.p95 <= self.target[1])


# Median and p95 by hold-out and rows.
TARGETS = {
    ("points", "all"): (0.035, 0.30),
    ("points, formulas alone", "all"): (0.07, 0.30),
    ("scale", "all"): (0.09, 0.45),
    ("scale", "from 1 MiB"): (0.075, 0.35),
    ("larger", "all"): (0.15, 0.80),
    ("larger", "from 1 MiB"): (0.12, 0.40),
    ("operation", "all_gather, reduce_scatter"): (0.08, 0.30),
    ("operation", "all_reduce, all_to_all"): (0.15, 0.60),
    ("system", "all"): (0.18, 1.00),
    ("system", "from 1 MiB"): (0.13, 0.60),
    ("system-6-points", "all"): (0.10, 0.60),
    ("system-6-points", "from 1 MiB"): (0.09, 0.45),
}
COVERAGE_TARGET = (0.75, 0.85)
CHOICE_TARGET = 0.9


@dataclasses.dataclass(frozen=True)
class Report:
    lines: list[Line]
    coverage: dict[str, float]  # of the 80 % interval, by hold-out
    choice: tuple[int, int] | None  # pairs named right, pairs
    names: tuple[str, ...] = ()  # of the hold-outs that were asked for

    def missed(self) -> list[str]:
        """Targets that are not met. A target without rows is not met."""
        found = [f"{x.hold_out}, {x.rows}" for x in self.lines if not x.met]
        seen = {(x.hold_out, x.rows) for x in self.lines}
        wanted = [key for key in TARGETS if key[0].split(",")[0] in self.names and key not in seen]
        found += [f"{name}, {rows}: no rows" for name, rows in wanted]
        low, high = COVERAGE_TARGET
        if "points" in self.coverage and not low <= self.coverage["points"] <= high:
            found.append("interval of points")
        if self.choice and self.choice[1] and self.choice[0] < CHOICE_TARGET * self.choice[1]:
            found.append("choice")
        return found


def line(hold_out: str, rows: str, error: np.ndarray) -> Line | None:
    """`error`: logarithm of measured over predicted. None without rows."""
    error = error[np.isfinite(error)]
    if not len(error):
        return None
    size = np.expm1(np.abs(error))
    median, p90, p95 = (float(x) for x in np.quantile(size, [0.5, 0.9, 0.95]))
    bias = float(np.expm1(-np.median(error)))
    target = TARGETS.get((hold_out, rows))
    return Line(hold_out, rows, len(error), median, p90, p95, float(np.mean(size <= 0.25)), bias, target)


def _lines(hold_out: str, table: Table, index: np.ndarray, error: np.ndarray) -> list[Line]:
    warm_up = np.array([measured.is_warm_up(table.rows[i]) for i in index], bool)
    size = np.array([table.rows[i].size for i in index], float)
    ops = np.array([table.rows[i].op for i in index], dtype=object)
    place = size_range(size)
    masks = {"all": ~warm_up, "from 1 MiB": ~warm_up & (size >= _MIB)}
    masks |= {name: ~warm_up & (place == i) for i, name in enumerate(SIZES)}
    if hold_out == "operation":
        for pair in (("all_gather", "reduce_scatter"), ("all_reduce", "all_to_all")):
            masks[", ".join(pair)] = ~warm_up & np.isin(ops, pair)
    masks["warm-up"] = warm_up
    return [found for name, mask in masks.items() if (found := line(hold_out, name, error[mask]))]


def run(table: Table, names: tuple[str, ...] = tuple(holdouts.HOLD_OUTS)) -> Report:
    """The errors of the hold-outs of a table of measured rows, with baselines where they can predict at all."""
    sizes = np.array([row.size for row in table.rows])
    cache: fit.Cache = {}
    lines, coverage, choice = [], {}, None
    for name in names:
        held_out = holdouts.predict(table, name, cache)
        if not len(held_out):
            continue
        lines += _lines(name, table, held_out.index, held_out.error)
        if name == "points":
            lines += _lines("points, formulas alone", table, held_out.index, held_out.plan_error)
        simple = {"points": ("alpha_beta", "interpolation"), "scale": ("textbook",), "larger": ("textbook",)}
        for baseline in simple.get(name, ()):
            parts = list(holdouts.HOLD_OUTS[name](table))
            errors = np.concatenate([getattr(baselines, baseline)(table, part) for part in parts])
            index = np.concatenate([np.flatnonzero(part.test) for part in parts])
            lines += _lines(f"{name}, {baseline}", table, index, errors)[:2]
        share = intervals.coverage(held_out, sizes)
        if np.isfinite(share):
            coverage[name] = share
        if name == "scale":
            choice = _choice(table, held_out)
    return Report(lines, coverage, choice, names)


def _choice(table: Table, held_out: holdouts.HeldOut) -> tuple[int, int]:
    """Pairs of algorithms of one library at one size and scale that differ by 25 %: how many are ordered right."""
    groups = defaultdict(list)
    for i, error in zip(held_out.index, held_out.error, strict=True):
        row = table.rows[i]
        if row.notes.get("algo"):
            others = row.notes.get("nic_interleave", "")
            groups[row.repo, row.hardware, row.op, row.ranks, row.size, row.dtype, others].append((i, error))
    right = pairs = 0
    log_time = np.log(measured.times(table))
    for members in groups.values():
        for k, (i, error_i) in enumerate(members):
            for j, error_j in members[:k]:
                ratio = log_time[i] - log_time[j]
                if abs(ratio) >= np.log(1.25):
                    pairs += 1
                    right += ratio * (ratio - error_i + error_j) > 0
    return right, pairs


def new_rows(table: Table, fitted: Fitted) -> Report:
    """The errors of fitted parameters on rows that they were not fitted to."""
    found = fitted.model.predict(table)
    sizes = np.array([row.size for row in table.rows])
    fresh = np.isfinite(found.log_time) & (found.evidence != "measured")
    error = np.log(measured.times(table)) - found.log_time
    index = np.flatnonzero(fresh)
    lines = _lines("new-rows", table, index, error[fresh])
    for name in sorted(set(found.evidence[fresh])):
        lines += _lines(f"new-rows, {name}", table, index, np.where(found.evidence == name, error, np.nan)[fresh])[:2]
    coverage = {}
    if len(index):
        low, high = intervals.limits(fitted.intervals, found.evidence[fresh], sizes[fresh], found.deviation[fresh])
        coverage["new-rows"] = float(np.mean((error[fresh] >= low) & (error[fresh] <= high)))
    return Report(lines, coverage, None)


_MEANING = {
    "points": "random 20 % of each series",
    "scale": "one number of ranks left out",
    "larger": "64 and 72 ranks, from at most 18",
    "operation": "one operation left out",
    "system": "one family of systems left out",
    "system-6-points": "the same, with 6 points of it known",
    "harness": "one harness left out",
}


def text(report: Report, path: str) -> str:
    """Markdown."""
    out = [
        f"# Errors on {path}",
        "",
        "Hold-outs: " + "; ".join(f"{k}: {v}" for k, v in _MEANING.items()) + ".",
        f"Seed {holdouts.SEED}. Rows with the note flag=slower_than_a_larger_size are counted as warm-up only.",
        "Percent. Bias: median of predicted over measured, minus 1. Target: median, p95.",
        "",
        "| hold-out | rows | count | median | p90 | p95 | within 25 % | bias | target | met |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for x in report.lines:
        target = f"{100 * x.target[0]:g}, {100 * x.target[1]:g}" if x.target else ""
        met = "" if x.target is None else "yes" if x.met else "no"
        numbers = " | ".join(f"{100 * v:.1f}" for v in (x.median, x.p90, x.p95, x.within_25, x.bias))
        out.append(f"| {x.hold_out} | {x.rows} | {x.count} | {numbers} | {target} | {met} |")
    out.append("")
    if not report.lines:
        out.append("There are no rows to predict.")
    for name, share in report.coverage.items():
        out.append(f"The 80 % interval of {name} holds {100 * share:.1f} % of rows that it was not made from.")
    if report.choice:
        right, pairs = report.choice
        out.append(f"Of {pairs} pairs of algorithms that differ by 25 %, {right} are ordered right (hold-out scale).")
    missed = report.missed()
    out.append("Targets missed: " + ("; ".join(missed) if missed else "none") + ".")
    return "\n".join(out) + "\n"
