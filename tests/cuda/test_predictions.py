"""The predicted times of docs/internals/cuda-bandwidth.md: as the tool writes them, with sources, by hand."""

import csv

import predictions
import pytest

H100, B200 = predictions.MACHINES


def test_the_page_is_up_to_date():
    """`python tests/cuda/tools/predictions.py` writes it."""
    text = predictions.PAGE.read_text()
    assert text == predictions.page(text)
    begin = text.index("## Predicted times")
    assert "Nothing in these tables has been measured with jaxcomm" in text[begin : text.index(predictions.BEGIN)]


def test_every_published_figure_has_a_source():
    with predictions.PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["library"] for row in rows} == {"NCCL", "MSCCL++"}
    assert {(row["machine"], row["op"]) for row in rows} >= {
        (machine.name, op) for machine in predictions.MACHINES for op in predictions.OPS
    }
    for row in rows:
        assert float(row["time_us"]) > 0 and int(row["bytes"]) > 0
        assert row["source"].count("/") >= 2 and ":" in row["source"]  # owner/repository:path


@pytest.mark.parametrize(("machine", "node", "own"), [(H100, 350e9, 1.5e12), (B200, 700e9, 1.5e12 * 8000 / 3350)])
def test_large_sizes_by_hand(machine, node, own):
    """Each of 32 thread blocks moves its part of all blocks with 1/32 of the bandwidth."""
    size = 1 << 30
    launch, barriers, part = 2.2e-6, 5e-6, size / 8
    moves = 0.3e-6 + 7 * 0.5e-6  # overheads of blocks that are too long to be moved at once
    all_to_all = predictions.predict(machine, "all_to_all", size)
    assert (all_to_all.protocol, all_to_all.sms) == ("steps", 32)
    assert all_to_all.in_place_s == pytest.approx(launch + barriers + moves + part / own + 7 * part / node)
    # In 128 chunks of 32 KiB of each block. The first two are copied before any transfer. Each later iteration takes
    # one overhead for its moves and one for its signals, except that the last two run at once after one latency.
    chunk = 32 * (32 << 10)
    first = 2 * (0.3e-6 + 7 * chunk / own + 0.5e-6)
    others = 126 * (0.5e-6 + 7 * chunk / node + 0.5e-6) + 0.5e-6 + 2 * 7 * chunk / node
    assert all_to_all.time_s == pytest.approx(launch + barriers + first + others + 1e-6)


def test_small_sizes_by_hand():
    """Operands of the size of the ring (32 MiB on 32 thread blocks) are copied, those of LL messages are not."""
    small = predictions.predict(H100, "all_to_all", 1 << 25)
    assert small.time_s == pytest.approx(small.in_place_s + (1 << 25) / 1.5e12)
    small = predictions.predict(H100, "all_gather", 1 << 16)
    assert small.protocol == "ll" and small.time_s == small.in_place_s
    assert small.time_s == pytest.approx(2.2e-6 + 7 * (0.03e-6 + 8192 / 175e9) + 1.5e-6)
    # With n ranks, n - 1 parts of n cross a GPU's link, and those of an all_reduce twice.
    assert predictions.of_wire(H100, "all_gather", 800, 700 / 450e9) == pytest.approx(1)
    assert predictions.of_wire(B200, "all_reduce", 800, 1400 / 900e9) == pytest.approx(1)
