"""docs/guide/clusters.md against real launchers: runs the commands and the script of the page."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from ranks import free_address

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "guide" / "clusters.md").read_text()
ENVIRONMENT = pathlib.Path(sys.prefix)
LIMIT_S = 200  # a quiet machine takes 4

pytestmark = pytest.mark.deadline(LIMIT_S + 30)


def block(title, language):
    """The first code block of a section in this language."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)[0]


SCRIPT = block("The script", "python")
EXPECTED = [f"process {rank} of 2: 4 devices, ranks [0, 1]" for rank in range(2)]


def start(command, folder, commands=(), **variables):
    """Runs a launcher: (exit status, sorted lines of the script, whole output)."""
    (folder / "hello.py").write_text(SCRIPT)
    ours = ("JAX", "XLA", "OMPI", "PMI", "MPI", "SLURM", "CUDA_VISIBLE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = [*commands, ENVIRONMENT / "bin", environment["PATH"]]
    environment |= {"PATH": os.pathsep.join(map(str, paths)), **variables}
    done = subprocess.run(  # timeout(1) lets a launcher end its processes
        ["timeout", "--kill-after=10", str(LIMIT_S), "bash", "-euc", command], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=LIMIT_S + 20, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, sorted(re.findall(r"process \d of .*?\]", done.stdout)), done.stdout + done.stderr


def at_free_port(command):
    assert "127.0.0.1:29500" in command
    return command.replace("127.0.0.1:29500", free_address())


def test_jaxcomm_run(tmp_path):
    status, said, output = start(block("One machine: jaxcomm.run", "bash"), tmp_path)
    assert (status, said) == (0, EXPECTED), output
    for line in block("One machine: jaxcomm.run", "text").splitlines():
        prefix, text = line.split(" ", 1)
        # Gloo ends its own lines separately, so one of them may stand before ours.
        assert re.search(rf"^{re.escape(prefix)} .*{re.escape(text)}$", output, re.MULTILINE), output


# Sections of the page, the launcher and its package in make setup's environment, whether the address is given.
WHEELS = ENVIRONMENT / "bin" / "mpirun", ENVIRONMENT / "mpich" / "bin" / "mpiexec"
LAUNCHERS = [
    pytest.param("By hand", None, True, marks=pytest.mark.full),
    ("Open MPI", WHEELS[0], True),
    pytest.param("Open MPI", WHEELS[0], False, marks=pytest.mark.full),
    pytest.param("MPICH", WHEELS[1], True, marks=pytest.mark.full),
    ("MPICH", WHEELS[1], False),
]


@pytest.mark.parametrize(("title", "launcher", "address"), LAUNCHERS)
def test_launcher(tmp_path, title, launcher, address):
    """On one host, MPI's launchers need no address."""
    assert launcher is None or launcher.exists(), f"{launcher} is missing; `make setup` installs the wheel"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if launcher else {}
    folders = [launcher.parent] if launcher else []
    if launcher:  # MPICH's wheel would overwrite Open MPI's mpirun
        version = start(f"{launcher.name} --version", tmp_path, folders, **as_root)[2]
        assert ("Open MPI" in version) == (title == "Open MPI"), version
    command = at_free_port(block(title, "bash"))
    if not address:
        command = re.sub(r"( -x JAX_COORDINATOR_ADDRESS)|( JAX_COORDINATOR_ADDRESS=[\d.:]+)", "", command)
        assert "JAX_COORDINATOR" not in command
    status, said, output = start(command, tmp_path, folders, **as_root)
    assert (status, said) == (0, EXPECTED), output


def test_kubernetes_manifest_agrees_with_itself():
    service, job = yaml.safe_load_all(block("Kubernetes", "yaml"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name = job["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    variables = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}  # a label that Kubernetes gives to the pods of a job
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert int(variables["JAX_NUM_PROCESSES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert "JAX_PROCESS_ID" in variables
