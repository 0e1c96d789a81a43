"""Wheels in fresh environments that see neither a compiler nor the sources."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
UV = pathlib.Path(sys.executable).with_name("uv")
OLDEST_JAX = re.search(r'"jax>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
LIMIT_S = 1500  # of a build on a busy machine


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT_S, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest_python():
    """An interpreter for the wheel of the stable ABI: on the path, or one of pyenv's."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"), "versions")
    for version in ("3.13", "3.12"):
        for candidate in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}*/bin/python3"))):
            if candidate and subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
                return candidate
    pytest.skip("no Python 3.12 or later on this machine")


def build(target, python, folder, *settings):
    """Builds a wheel with a target of the Makefile."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    run(
        "make", "-C", ROOT, target, f"PYTHON={python}", f"VENV={folder / 'build-env'}", f"WHEEL_DIR={folder / 'dist'}",
        *settings, env=environment,
    )  # fmt: skip
    (wheel,) = (folder / "dist").glob("*cuda13*.whl" if "cuda" in target else "jaxcomm-*.whl")
    assert re.search(r"-manylinux_2_\d+_x86_64\.whl$", wheel.name)
    return wheel


def environment(python, folder, *packages):
    """A fresh environment's interpreter."""
    run(UV, "venv", "-q", "--python", python, folder)
    run(UV, "pip", "install", "-q", "--python", folder / "bin" / "python", *packages)
    return folder / "bin" / "python"


def output(python, program, folder):
    """Output of a program that has no access to a compiler or the sources."""
    return run(python, "-W", "error", "-c", program, cwd=folder, env={"PATH": str(python.parent), "HOME": str(folder)})


@pytest.fixture(scope="module", params=["python3.11", "newest"])
def python(request):
    if request.param == "newest":
        return newest_python()
    if sys.version_info[:2] != (3, 11):
        pytest.skip("this environment is not of Python 3.11")
    return sys.executable


@pytest.fixture(scope="module")
def wheel(python, tmp_path_factory):
    return build("wheel", python, tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("jax", [f"jax=={OLDEST_JAX}", "jax"])
def test_first_example(jax, python, wheel, tmp_path):
    if "cp311" not in wheel.name:
        assert "-cp312-abi3-" in wheel.name
    example, expected = (re.search(rf"^```{word}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
                         for word in ("python", "text"))  # fmt: skip
    fresh = environment(python, tmp_path / "env", wheel, jax)
    assert output(fresh, example, tmp_path) == expected
    files = output(fresh, "import jaxcomm; print(jaxcomm.get_include(), jaxcomm.get_cmake_dir())", tmp_path).split()
    assert pathlib.Path(files[0], "jaxcomm", "device.h").exists()
    assert pathlib.Path(files[1], "jaxcommConfig.cmake").exists()


@pytest.mark.parametrize("python", ["newest"], indirect=True)  # jax for CUDA 13 needs Python 3.12
def test_package_of_the_cuda_module(python, wheel, tmp_path):
    cuda = build("wheel-cuda", python, tmp_path, "CUDA_ARCHITECTURES=90-virtual")
    fresh = environment(python, tmp_path / "env", wheel)
    run(UV, "pip", "install", "-q", "--no-deps", "--python", fresh, cuda)
    program = "from jaxcomm import _native; print(_native.cuda().__name__, sorted(_native.cuda().cuda_targets())[0])"
    assert output(fresh, program, tmp_path) == "jaxcomm_cuda13._cuda jaxcomm_all_gather\n"
    versions = output(fresh, "from jaxcomm import _native; print(_native.cuda().built()['gin'])", tmp_path)
    assert versions == "2.32.3, 2.30.7, 2.29.7\n"  # of NCCL
    requires = output(fresh, "import importlib.metadata as m; print(m.requires('jaxcomm-cuda13'))", tmp_path)
    assert "'jaxcomm==0.1.0'" in requires and "nvidia-nccl-cu13==" in requires
