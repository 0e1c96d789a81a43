"""Small options for models/moe, an uninterrupted run with them, and a cache of compiled programs."""

import dataclasses
import functools
import os
import pathlib
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from training import OPTIONS, TINY

# Appended, so that an installed jaxcomm precedes its sources in the repository.
sys.path.append(str(pathlib.Path(__file__).parents[2]))

from models.lm import train
from models.moe.config import Config
from models.moe.train import Run


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)  # a fixture of the package would last to the end of the session
def _cached_compilation(request, cache):
    """These tests spend most of their time in compilations of the same programs. `--size full` has no cache."""
    if request.config.getoption("--size") != "default":
        yield
        return
    settings = {
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for processes that tests start
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def mesh():
    return train.make_mesh(TINY)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        lines = [f"def function_{number}_{line}(x):\n    return x + {line * number}\n" for line in range(20)]
        (folder / f"file_{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def tiny(tmp_path):
    return dataclasses.replace(TINY, out=str(tmp_path / "run"))


@pytest.fixture(scope="session")
def _folder_of_alone(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@pytest.fixture  # not of the session: it would start before _cached_compilation
def alone(_folder_of_alone):
    """Folder, Run and summary of an uninterrupted run in this process, for all tests. They change none of them."""
    return _uninterrupted_run(_folder_of_alone)


@functools.cache
def _uninterrupted_run(out):
    run = Run(Config(**{**OPTIONS, "out": str(out)}))
    return out, run, train.train(run)
