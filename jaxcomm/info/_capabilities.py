"""Capabilities of the GPUs, the driver, NCCL and XLA of this process: yes, no or unknown, and the reason.

docs/guide/gpu-install.md lists NCCL's conditions and their sources.
"""

import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax

from jaxcomm import _native

_MULTIMEM = (9, 0)  # the oldest GPUs with NVLink SHARP
_HOST_RMA_DRIVER = 12050
_SOCKET_GIN = 23203
_GDRDRV = pathlib.Path("/dev/gdrdrv")
_GIN_KINDS = {0: "none", 2: "proxy", 3: "GDAKI", 4: "GPI"}  # ncclGinType_t of 2.30.7
_UNKNOWN = "depends on the communicator: call info(communicator=True)"


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whether a capability exists (None: unknown), and the reason."""

    yes: bool | None
    why: str

    def __str__(self) -> str:
        word = "unknown" if self.yes is None else "yes" if self.yes else "no"
        return f"{word}: {self.why}" if self.why else word


@dataclasses.dataclass(frozen=True)
class Cuda:
    """The CUDA module and its findings. A problem is a sentence; empty means no problem."""

    module: ModuleType | None
    problem: str
    devices: tuple[dict[str, Any], ...] = ()
    devices_problem: str = ""
    nccl: dict[str, Any] | None = None
    nccl_problem: str = ""

    @property
    def obstacle(self) -> str:
        """The first problem that rules out all capabilities; empty if there is none."""
        return self.problem or self.devices_problem or self.nccl_problem


def version(code: int, factor: int = 10000) -> str:
    """Version number as text: NCCL's 23007 -> "2.30.7"; CUDA's 13000, with factor 1000 -> "13.0"."""
    major, rest = divmod(code, factor)
    return f"{major}.{rest // 10}" if factor == 1000 else f"{major}.{rest // 100}.{rest % 100}"


def find_cuda() -> Cuda:
    """Loads the CUDA module and NCCL."""
    try:
        module = _native.cuda()
    except ImportError as error:
        return Cuda(None, str(error))
    nccl, nccl_problem = None, ""
    try:
        nccl = module.nccl(_native.nccl_wheel())
    except RuntimeError as error:
        nccl_problem = str(error)
    devices: tuple[dict[str, Any], ...] = ()
    devices_problem = ""
    try:
        devices_problem = _native.driver_problem(module)
        if not devices_problem:
            devices = tuple(module.devices())
            devices_problem = "" if devices else "there is no GPU"
    except RuntimeError as error:
        devices_problem = str(error)
    return Cuda(module, "", devices, devices_problem, nccl, nccl_problem)


def plugin() -> tuple[str, str]:
    """Name and version of JAX's plugin for NVIDIA GPUs, or empty strings."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", ""


def _xla_collectives() -> Answer:
    name, plugin_version = plugin()
    if not name:
        return Answer(False, "JAX has no plugin for NVIDIA GPUs: install jax[cuda12] or jax[cuda13]")
    prefix = "XLA_FFI_Extension_Collectives_"
    found = _native.jaxlib_version("collectives_c_api.h", f"{prefix}MajorVersion", f"{prefix}MinorVersion")
    if found is None:
        return Answer(False, f"jaxlib {importlib.metadata.version('jaxlib')} has none; install 0.11.2 or later")
    return Answer(True, f"{found[0]}.{found[1]} by jaxlib's headers; {name} {plugin_version}")


def _disabled(*names: str) -> str:
    return next((f"{name}=0 is set" for name in names if os.environ.get(name) == "0"), "")


def _apart(cuda: Cuda, numbers: Sequence[int]) -> str:
    for one, other in itertools.permutations(numbers, 2):
        if other not in cuda.devices[one]["peers"]:
            return f"GPU {one} can't reach GPU {other}"
    return ""


def _gin_problem(cuda: Cuda, nics: Sequence[str]) -> str:
    assert cuda.module is not None and cuda.nccl is not None
    found, built = cuda.nccl["version"], cuda.module.built()["gin"]
    if version(found) not in built.split(", "):
        return f"kernels that use it need the NCCL that they were built with, {built}; found {version(found)}"
    if not nics and not (found >= _SOCKET_GIN and _GDRDRV.exists()):
        return "there is no device in /sys/class/infiniband"
    return ""


def _kernels(cuda: Cuda, numbers: Sequence[int]) -> Answer:
    assert cuda.module is not None
    built = cuda.module.built()["architectures"]
    for number in numbers:
        try:
            if problem := cuda.module.code_problem(number):
                return Answer(False, f"GPU {number}: {problem}; there is code for {built}")
        except RuntimeError as error:
            return Answer(False, f"GPU {number}: {error}")
    return Answer(True, f"there is code for {built}")


def _conditions(cuda: Cuda, numbers: Sequence[int], nics: Sequence[str]) -> dict[str, Answer]:
    """Answers without a communicator: False for capabilities that some condition rules out, else unknown."""
    assert cuda.module is not None
    windows = _disabled("NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE") or _apart(cuda, numbers)
    old = [number for number in numbers if tuple(cuda.devices[number]["capability"]) < _MULTIMEM]
    multimem = windows or _disabled("NCCL_NVLS_ENABLE") or (f"GPU {old[0]} is older than Hopper" if old else "")
    driver = cuda.module.driver_version()
    rma = (
        "" if driver >= _HOST_RMA_DRIVER else f"it needs a driver for CUDA 12.5 or later, found {version(driver, 1000)}"
    )
    problems = {
        "windows": windows,
        "LSA": windows,
        "multimem": multimem,
        "GIN": _gin_problem(cuda, nics),
        "host RMA": windows or rma,
    }
    return {name: Answer(False, problem) if problem else Answer(None, _UNKNOWN) for name, problem in problems.items()}


def _queried(cuda: Cuda, numbers: Sequence[int], nics: Sequence[str]) -> dict[str, Answer]:
    """Answers from a temporary communicator over these GPUs."""
    assert cuda.module is not None
    names = ("windows", "LSA", "multimem", "GIN", "host RMA")
    try:
        found = cuda.module.communicator_properties(_native.nccl_wheel(), list(numbers))
    except RuntimeError as error:
        return dict.fromkeys(names, Answer(None, f"NCCL could not create a communicator: {error}"))
    whose = f"by a communicator of {len(numbers)} GPU(s) of this process"
    kind, railed = (_GIN_KINDS.get(found[key], f"kind {found[key]}") for key in ("gin", "railed_gin"))
    gin = Answer(True, f"{kind}, on rails {railed}, {whose}")
    if not found["gin_usable"]:
        problem = _gin_problem(cuda, nics) or "it is needed between all GPUs"
        gin = Answer(False, f"{kind}, on rails {railed}, but {problem}")
    return {
        "windows": Answer(found["device_api"], whose),
        "LSA": Answer(found["device_api"], f"{found['num_lsa_teams']} team(s), {whose}"),
        "multimem": Answer(found["multimem"], whose),
        "GIN": gin,
        "host RMA": Answer(found["host_rma"], whose),
    }


def capabilities(
    cuda: Cuda, devices: Sequence[jax.Device], nics: Sequence[str], communicator: bool
) -> dict[str, Answer]:
    """One answer for each capability."""
    names = ("kernels", "windows", "LSA", "multimem", "GIN", "host RMA")
    xla = {"XLA collectives extension": _xla_collectives()}
    if cuda.obstacle:
        return dict.fromkeys(names, Answer(False, cuda.obstacle)) | xla
    numbers = [device.local_hardware_id for device in devices if device.platform == "gpu"]
    numbers = [number for number in numbers if number < len(cuda.devices)]
    if not numbers:
        return dict.fromkeys(names, Answer(None, "JAX uses no GPU in this process")) | xla
    answers = {"kernels": _kernels(cuda, numbers)}
    return answers | (_queried if communicator else _conditions)(cuda, numbers, nics) | xla
