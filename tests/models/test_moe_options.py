"""Options and data of models/moe: files, held-out text, errors."""

import dataclasses
import json

import pytest

from models.lm import config as config_lib
from models.lm import data
from models.moe.config import Config

# Data.


def test_split_is_disjoint_complete_and_stable(text_folder):
    names = list(data.read_folder(text_folder))
    training, heldout = data.split_names(names, 0.2)
    assert training and heldout and sorted(training + heldout) == names
    fewer = [name for name in names if name != heldout[0]]
    assert data.split_names(fewer, 0.2) == (training, heldout[1:])
    assert data.split_names(["a", "b"], 1e-9)[1] and data.split_names(["a", "b"], 1 - 1e-9)[0]


def test_binary_and_hidden_files_are_skipped(tmp_path):
    """Files are sorted by their names, and a zero byte is between any two of a side."""
    names = ("d/b", "d.a", "d/a", ".hidden", "c/.git/a", "site-packages/a", "c/__pycache__/a", "image")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x89\0" if name == "image" else name.encode())
    read = {name: name.encode() for name in sorted(names[:3])}
    assert list(data.read_folder(tmp_path).items()) == list(read.items())
    for heldout in (0.01, 0.99):
        sides = data.split_names(list(read), heldout)
        assert sorted(map(len, sides)) == [1, 2]
        texts = [bytes(text) for text in data.load(tmp_path, heldout, 3)]
        assert texts == [b"\0".join(read[name] for name in side) for side in sides]
        with pytest.raises(ValueError, match=f"3 bytes of {'training' if len(sides[0]) == 1 else 'held-out'} text"):
            data.load(tmp_path, heldout, 6)


# Errors.


def test_resume_of_a_run_that_is_older_than_an_option_has_its_default(tmp_path):
    path = tmp_path / "config.json"
    saved = dataclasses.asdict(Config(out=str(tmp_path)))
    del saved["moe"]
    path.write_text(json.dumps(saved))
    assert config_lib.load(Config, path, {}).moe == Config.moe


def test_bad_data_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        data.load(str(tmp_path / "missing"), 0.1, 10)
    with pytest.raises(ValueError, match="0 text files in"):
        data.load(str(tmp_path), 0.1, 10)
