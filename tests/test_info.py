"""info() with and without module, driver, GPUs, NCCL, nvidia-smi and NICs. Missing parts never raise.

Where there is no GPU, fakes of the module, of JAX's devices and of nvidia-smi stand in for them.
"""

import dataclasses
import os
import subprocess
import sys
import types

import jax
import pytest

import jaxcomm
from jaxcomm import _native
from jaxcomm._request import NATIVE
from jaxcomm.info import _capabilities, _collectives, _machine

LIBRARY = "/somewhere/libnccl.so.2"
NAMES = ("kernels", "windows", "LSA", "multimem", "GIN")
ASK = "unknown: depends on the communicator: call info(communicator=True)"


class Module:
    """jaxcomm._cuda on a machine with two H100, or with what the arguments say."""

    def __init__(self, **changes):
        self.driver, self.version, self.failure, self.code, self.gpus = 13000, 23007, "", ["", ""], 2
        self.properties = {
            "device_api": True, "multimem": False, "gin": 3, "railed_gin": 3, "gin_usable": True, "num_lsa_teams": 1,
        }  # fmt: skip
        self.__dict__ |= changes
        self.driver_version, self.code_problem = lambda: self.driver, self.code.__getitem__
        self.built = lambda: {"cuda": 13000, "nccl": 23007, "gin": "2.30.7, 2.29.7", "architectures": "90"}

    def num_devices(self):
        if isinstance(self.gpus, str):
            raise RuntimeError(self.gpus)
        return self.gpus

    def nccl(self, wheel):
        if not self.version:
            raise RuntimeError("no NCCL: nowhere")
        return {"path": LIBRARY, "version": self.version}

    def communicator_properties(self, wheel, devices):
        assert devices == [0, 1]
        if self.failure:
            raise RuntimeError(self.failure)
        return self.properties


@dataclasses.dataclass(frozen=True)
class Gpu:
    local_hardware_id: int
    platform: str = "gpu"


@pytest.fixture
def answers(monkeypatch):
    """Answers of capabilities() for a machine, as text."""

    def ask(module, communicator=False, devices=(Gpu(0), Gpu(1))):
        monkeypatch.setattr(_native, "cuda", lambda: module)
        found = _capabilities.capabilities(_capabilities.find_cuda(), devices, communicator)
        return {name: str(answer) for name, answer in found.items()}

    return ask


def test_this_machine():
    found = jaxcomm.info()
    assert isinstance(found, jaxcomm.Info)
    assert found.versions["jaxcomm"] == jaxcomm.__version__
    assert found.versions["jax"] == jax.__version__
    assert tuple(map(int, found.versions["XLA FFI API"].split("."))) >= (0, 3)
    assert len(found.devices) == len(jax.local_devices())
    assert set(found.capabilities) == {*NAMES, "XLA collectives extension"}
    assert all(answer.why for answer in found.capabilities.values())
    listed = {NATIVE[call.partition(" of ")[0]] for call in found.collectives}
    assert listed == set(NATIVE.values()) - {"all_to_all_v"}
    answers = map(str, found.capabilities.values())
    for line in (*found.versions.values(), *found.devices, *answers, *found.collectives.values()):
        assert line in str(found)


def test_command():
    command = (sys.executable, "-W", "error", "-m", "jaxcomm.info")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles == ["versions", "devices", "NVLink", "NICs", "capabilities", "collectives"]


def test_neither_devices_nor_the_module_for_gpus(monkeypatch):
    def local_devices():
        raise RuntimeError("Unable to initialize backend 'nowhere'")

    def cuda():
        raise ImportError("jaxcomm was built without CUDA")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(_native, "cuda", cuda)
    found = jaxcomm.info()
    assert found.devices == ("none: Unable to initialize backend 'nowhere'",)
    assert found.versions["CUDA module"] == "no: jaxcomm was built without CUDA"
    assert found.versions["NCCL"] == "not searched for without the CUDA module"
    assert {str(found.capabilities[name]) for name in NAMES} == {"no: jaxcomm was built without CUDA"}


def test_reason_of_a_missing_module(monkeypatch):
    monkeypatch.setattr(_native.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"is missing: install jaxcomm-cuda13, or .* There is none for CUDA 12"):
        _native.cuda.__wrapped__()
    assert _native.nccl_wheel() == ""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Module(driver=0), "no: there is no NVIDIA driver"),
        (Module(gpus=0), "no: there is no GPU"),
        (Module(gpus="cudaGetDeviceCount: error"), "no: cudaGetDeviceCount: error"),
        (Module(version=0), "no: no NCCL: nowhere"),
        (Module(driver=12040), "no: the driver serves CUDA 12.4, jaxcomm was built with 13.0: install a newer driver"),
    ],
)
def test_reasons_against_all_capabilities(module, said, answers):
    found = answers(module)
    assert {found[name] for name in NAMES} == {said}


@pytest.mark.parametrize("devices", [jax.local_devices(), [Gpu(2)]], ids=["CPUs", "a GPU that the driver lacks"])
def test_jax_without_gpus(answers, devices):
    assert answers(Module(), devices=devices)["windows"] == "unknown: JAX uses no GPU in this process"


@pytest.mark.parametrize(
    ("changes", "impossible"),
    [
        ({"code": ["", "no kernel image"]}, {"kernels": "GPU 1: no kernel image; there is code for 90"}),
        (
            {"version": 23203},
            {"GIN": "kernels that use it need the NCCL that they were built with, 2.30.7, 2.29.7; found 2.32.3"},
        ),
        ({"version": 22907}, {}),
    ],
)
def test_reasons_against_some_capabilities(changes, impossible, answers):
    found = answers(Module(**changes))
    possible = dict.fromkeys(NAMES, ASK) | {"kernels": "yes: there is code for 90"}
    assert {name: found[name] for name in NAMES} == possible | {name: f"no: {why}" for name, why in impossible.items()}


def test_capabilities_by_a_communicator(answers):
    whose = "by a communicator of 2 GPU(s) of this process"
    found = answers(Module(), communicator=True)
    expected = [f"yes: {whose}", f"yes: 1 team(s), {whose}", f"no: {whose}", f"yes: GDAKI, on rails GDAKI, {whose}"]
    assert [found[name] for name in NAMES[1:]] == expected
    unusable = Module().properties | {"gin_usable": False}
    found = answers(Module(version=23203, properties=unusable), communicator=True)
    assert found["GIN"].startswith(
        "no: GDAKI, on rails GDAKI, but kernels that use it need the NCCL that they were built with, 2.30.7"
    )
    found = answers(Module(properties=unusable | {"gin": 0, "railed_gin": 5}), communicator=True)
    assert found["GIN"] == "no: none, on rails kind 5, but it is needed between all GPUs"
    found = answers(Module(failure="ncclCommInitRank: unhandled cuda error"), communicator=True)
    said = "unknown: NCCL could not create a communicator: ncclCommInitRank: unhandled cuda error"
    assert {found[name] for name in NAMES[1:]} == {said}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Makes an nvidia-smi of this shell script. Until then, there is none."""
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(script):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{path}")

    return make


def test_a_machine_with_gpus(smi, monkeypatch, tmp_path):
    """The whole of info(), with a communicator and without, beside a driver, two GPUs and no NIC."""
    smi(r"printf '\t\033[4mGPU0\tGPU1\033[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n'")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.82.07  Release Build\n")
    gpus = [types.SimpleNamespace(id=i, local_hardware_id=i, platform="gpu", device_kind="H100") for i in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    monkeypatch.setattr(_native, "cuda", Module)
    monkeypatch.setattr(_native, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(_machine, "INFINIBAND", tmp_path / "none")
    monkeypatch.setattr(_collectives, "defaults", lambda devices: {})  # JAX has no such devices
    found = jaxcomm.info()
    assert found.devices == ("0: gpu, H100", "1: gpu, H100")
    assert found.nvlink == ("\tGPU0\tGPU1", "GPU0\t X \tNV18", "GPU1\tNV18\t X ")
    assert "  GPU0\t X \tNV18\n" in str(found)
    assert found.versions["NVIDIA driver"] == "580.82.07, serves CUDA 13.0"
    module = "CUDA 13.0, headers of NCCL 2.30.7, GIN for 2.30.7, 2.29.7, architectures 90"
    assert found.versions["CUDA module"] == module
    assert found.versions["NCCL"] == f"2.30.7 from {LIBRARY}"
    assert str(found.capabilities["windows"]) == ASK
    assert jaxcomm.info(communicator=True).capabilities["windows"].yes


def test_no_nvidia_smi_and_a_broken_one(smi, monkeypatch):
    assert _machine.nvlink() == ("there is no nvidia-smi",)
    smi("echo NVIDIA-SMI has failed; exit 9")
    assert _machine.nvlink() == ("nvidia-smi topo -m: NVIDIA-SMI has failed",)
    smi("exec sleep 60")
    monkeypatch.setattr(_machine, "_LIMIT_S", 0.2)
    assert "timed out" in _machine.nvlink()[0]


def test_drivers_and_nics(monkeypatch, tmp_path):
    monkeypatch.setattr(_machine, "INFINIBAND", tmp_path / "infiniband")
    assert _machine.nics() == ()
    monkeypatch.setattr(_native, "_DRIVER", tmp_path / "none")
    assert _native.kernel_driver() == ""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "mlx5_core").mkdir()
    (tmp_path / "infiniband" / "mlx5_0" / "device").mkdir()
    (tmp_path / "infiniband" / "mlx5_0" / "device" / "driver").symlink_to(tmp_path / "mlx5_core")
    assert _machine.nics() == ("mlx5_0 port 1: mlx5_core, ACTIVE, 400 Gb/sec (4X NDR), ?",)
    monkeypatch.setattr(_native, "cuda", Module)
    text = str(jaxcomm.info())
    assert "  mlx5_0 port 1: mlx5_core" in text and " version unknown, serves CUDA 13.0\n" in text


@pytest.mark.parametrize("header", [True, False])
def test_collectives_extension_of_xla(header, monkeypatch, tmp_path):
    assert str(_capabilities._xla_collectives()).startswith(("no: JAX has no plugin", "yes: 0."))
    api = tmp_path / "xla" / "ffi" / "api"
    api.mkdir(parents=True)
    if header:
        (api / "collectives_c_api.h").write_text(
            "#define XLA_FFI_Extension_Collectives_MajorVersion 0\n"
            "#define XLA_FFI_Extension_Collectives_MinorVersion 2\n"
        )
    monkeypatch.setattr(_capabilities, "plugin", lambda: ("jax-cuda13-plugin", "0.12.0"))
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    found = _capabilities._xla_collectives()
    assert found.yes == header
    assert found.why.startswith("0.2 by jaxlib's headers; jax-cuda13-plugin 0.12.0" if header else "jaxlib 0.1")
