"""docs/guide/what-if.md: every command runs and prints the lines that the page quotes, in their order."""

import pathlib
import re
import shlex

import pytest

from jaxcomm.simulate import cli

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "what-if.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_of_the_page_has_its_output():
    assert PAGE.count("python -m jaxcomm.simulate ") == sum(commands.count("\n") for commands, _ in BLOCKS) == 13


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    ("commands", "expected"), BLOCKS, ids=[shlex.split(c)[3] + str(i) for i, (c, _) in enumerate(BLOCKS)]
)
def test_what_if(commands, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands.splitlines():
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "jaxcomm.simulate"]
        assert cli.main(words[3:]) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in expected.splitlines():
        assert any(line == found for found in printed), f"not printed, or not in this order: {line}"
