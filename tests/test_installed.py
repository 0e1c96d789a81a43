"""import jaxcomm in a folder of sources without the compiled module, as in a checkout."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import jaxcomm

SOURCES = pathlib.Path(jaxcomm.__file__).parent


@pytest.mark.parametrize("stubs", [False, True])
def test_sources_without_the_compiled_module(stubs, tmp_path):
    folder = tmp_path / "jaxcomm"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("_core*", "_cuda*", "__pycache__"))
    if stubs:
        (folder / "_core").mkdir()
        (folder / "_core" / "__init__.pyi").touch()
    # -S: without the packages of this environment, where jaxcomm is installed
    command = [sys.executable, "-S", "-m", "jaxcomm.info"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert f"jaxcomm: {folder} has no compiled module _core. In a checkout, run Python from another" in done.stderr
    assert "`pip install -e .`" in done.stderr
