"""tools.simulator.table_file: what it reads, and the file, line and column of what it refuses."""

import made
import pytest

from jaxcomm.simulate.nccl import hardware
from tools.simulator import measured, rows, table_file


def test_cells_become_numbers_and_notes(tmp_path):
    note = "lib=NCCL; algo=ring; ci_baseline; printed=time,algbw; flag=slower_than_a_larger_size; tokens=64"
    row = made.read(tmp_path / "t.csv", [{"note": note, "bytes": "4096", "time_us": "12.5"}]).rows[0]
    assert (row.repo, row.ranks, row.bytes, row.line) == ("somebody/sweep", 8, 4096, 2)
    assert measured.is_warm_up(row) and row.library == "NCCL" and row.notes["ci_baseline"] == ""


def test_a_series_does_not_depend_on_notes_that_follow_from_the_time(tmp_path):
    """Tables that are to be predicted lack those notes."""
    notes = [
        "lib=NCCL; algo=ring; printed=time; rounding=+-6%; flag=x; bw=logical; bytes=from shape",
        "lib=NCCL; algo=ring",
        "lib=NCCL; algo=tree",
    ]
    same, also, other = (measured.series(r) for r in made.read(tmp_path / "t.csv", [{"note": n} for n in notes]).rows)
    assert same == also != other


def test_expert_rows_may_lack_bytes_and_time(tmp_path):
    rows = [{"op": "ep_combine", "bytes": "", "time_us": "", "note": "tokens=128"}, {}]
    found = table_file.read(made.write(tmp_path / "t.csv", rows))
    assert found.rows[0].bytes is None and found.rows[0].size == 128
    assert len(found) == 2 and measured.times(made.read(tmp_path / "t.csv", rows)).tolist() == [100]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ranks": "eight"}, "t.csv:3: column ranks: got 'eight', expected an integer from 1"),
        ({"bytes": ""}, "t.csv:3: column bytes: got '', expected a positive number"),
        ({"time_us": "inf"}, "t.csv:3: column time_us: got 'inf'"),
        ({"op": "all_reduced"}, "t.csv:3: column op: got 'all_reduced', expected one of all_reduce, "),
        ({"hardware": ""}, "t.csv:3: column hardware: got ''"),
        ({"note": "topk=many"}, "t.csv:3: column note: got topk='many'"),
    ],
)
def test_a_bad_cell_is_named_by_line_and_column(tmp_path, row, message):
    with pytest.raises(table_file.TableError) as error:
        made.read(tmp_path / "t.csv", [{}, row])
    assert message in str(error.value)


def test_a_table_to_predict_needs_no_times(tmp_path):
    path = made.write(tmp_path / "t.csv", [{}], [c for c in made.COLUMNS if c != "time_us"])
    assert len(table_file.read(path)) == 1
    with pytest.raises(table_file.TableError, match="missing columns time_us"):
        measured.read(path)


def test_hardware_and_network_rates_are_recognised(tmp_path):
    names = {"8x H100 per node (p5.48xlarge)": "H100", "GB300-class NVL72 (sm_103)": "GB300", "NDm A100 v4": "A100",
             "GB200 NVL72, 20 racks": "GB200", "8x MI355X-class (gfx950)": "MI355X"}  # fmt: skip
    assert {name: hardware.device(name).name for name in names} == names and hardware.device("TPU v5e") is None
    rates = {"2x 400 Gb/s InfiniBand per rank; NVLink and shared memory disabled": 100, "NVLink4 + InfiniBand": 50,
             "NVLink3 + 400 Gb/s EFA per node": 6.25, "NVLink4 + 8x 400 Gb/s InfiniBand per node": 50}  # fmt: skip
    row = {"hardware": "8x H100", "ranks": "16", "ranks_per_node": "8"}
    found = made.read(tmp_path / "t.csv", [row | {"interconnect": text} for text in rates]).rows
    assert [rows.nic_rate(one, hardware.device(one.hardware)) for one in found] == list(rates.values())
