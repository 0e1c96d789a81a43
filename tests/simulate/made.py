"""Tables made from known parameters: what a fit has to find again."""

import csv

import numpy as np

from tools.simulator import forms, measured, table_file
from tools.simulator.rows import features

COLUMNS = (*table_file.REQUIRED[:8], "time_us", "note")
DEFAULTS = {
    "source": "somebody/sweep:file.md",
    "hardware": "GB200 NVL72",
    "interconnect": "NVLink5; one NVL72 domain",
    "op": "all_reduce",
    "dtype": "float32",
    "ranks": "8",
    "ranks_per_node": "4",
    "bytes": "1048576",
    "time_us": "100",
    "note": "lib=NCCL 2.27.7",
}


def write(path, rows, columns=COLUMNS):
    """Rows are dicts over DEFAULTS."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([{**DEFAULTS, **row}[c] for c in columns] for row in rows)
    return path


def read(path, rows):
    return measured.read(write(path, rows))


def features_of(tmp_path, **row):
    """Features of one row."""
    return features(read(tmp_path / "one.csv", [{k: str(v) for k, v in row.items()}]))


def sweep(ops, ranks, sizes, **row):
    return [{**row, "op": op, "ranks": str(n), "bytes": str(b)} for op in ops for n in ranks for b in sizes]


def timed(path, rows, values, noise=0.0, seed=0):
    """A table of `rows` whose times follow from the parameters `values`, with log-normal noise."""
    found = read(path, rows)
    q = features(found)
    random = np.random.default_rng(seed)
    times = np.zeros(len(found))
    for i, row in enumerate(found.rows):
        form = forms.FORMS[forms.form(row, q, i)]
        times[i] = form(q.take(np.array([i])), values)[0] * np.exp(noise * random.normal())
    return read(path, [{**row, "time_us": f"{t:.9g}"} for row, t in zip(rows, times, strict=True)])
