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


def test_standard_library_is_found_and_split():
    contents = data.read_folder()
    assert len(contents) > 100 and all(name.endswith(".py") for name in contents)
    training, heldout = data.split_names(list(contents), 0.05)
    assert 0.02 < len(heldout) / len(contents) < 0.1
    assert not set(training) & set(heldout)


def test_binary_and_hidden_files_are_skipped(tmp_path):
    for name, text in {"b": b"bb", "a": b"aa", ".hidden": b"x", "image": b"\x89\0"}.items():
        (tmp_path / name).write_bytes(text)
    assert data.read_folder(tmp_path) == {"a": b"aa", "b": b"bb"}
    training, heldout = data.load(tmp_path, 0.5, 2)
    assert {bytes(training), bytes(heldout)} == {b"aa", b"bb"}


# Errors.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--experts", "12"], "--experts: got 12, expected a multiple of node x gpu = 8 in --layout 2x4"),
        (["--heads", "3"], "--width: got 128, expected a multiple of 2 * heads = 6"),
        (["--capacity", "2"], "--capacity: no effect with --moe dropless; remove it"),
        (["--eval_capacity", "3"], "--eval_capacity: no effect with --moe dropless; remove it"),
        (["--temperature", "1", "--sample", "0"], "--temperature: no effect with --sample 0; remove it"),
        (["--prompt", "x", "--sample", "0"], "--prompt: no effect with --sample 0; remove it"),
    ],
)
def test_bad_options_are_named(argv, message, capsys):
    with pytest.raises(SystemExit):
        config_lib.parse(Config, argv)
    assert message in capsys.readouterr().err


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
    for name in "ab":
        (tmp_path / name).write_text("short")
    with pytest.raises(ValueError, match="5 bytes of training text, expected at least 10"):
        data.load(str(tmp_path), 0.1, 10)
