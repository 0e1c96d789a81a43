"""Capabilities of the GPUs, the driver, NCCL and XLA of this process: yes, no or unknown, and the reason."""

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax

from jaxcomm import _native

_OF_COMMUNICATOR = ("windows", "LSA", "multimem", "GIN")  # what only a communicator knows
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
    num_devices: int = 0
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
    num_devices, devices_problem = 0, ""
    try:
        devices_problem = _native.driver_problem(module)
        if not devices_problem:
            num_devices = module.num_devices()
            devices_problem = "" if num_devices else "there is no GPU"
    except RuntimeError as error:
        devices_problem = str(error)
    return Cuda(module, "", num_devices, devices_problem, nccl, nccl_problem)


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
        return Answer(False, "JAX has no plugin for NVIDIA GPUs: install jax[cuda13]")
    prefix = "XLA_FFI_Extension_Collectives_"
    found = _native.jaxlib_version("collectives_c_api.h", f"{prefix}MajorVersion", f"{prefix}MinorVersion")
    if found is None:
        return Answer(False, f"jaxlib {importlib.metadata.version('jaxlib')} has none; install 0.11.2 or later")
    return Answer(True, f"{found[0]}.{found[1]} by jaxlib's headers; {name} {plugin_version}")


def _gin_problem(cuda: Cuda) -> str:
    """Why jaxcomm's kernels cannot use this NCCL's GIN, wherever the GPUs are; empty if they can."""
    assert cuda.module is not None and cuda.nccl is not None
    found, built = cuda.nccl["version"], cuda.module.built()["gin"]
    if version(found) in built.split(", "):
        return ""
    return f"kernels that use it need the NCCL that they were built with, {built}; found {version(found)}"


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


def _queried(cuda: Cuda, numbers: Sequence[int]) -> dict[str, Answer]:
    """Answers from a temporary communicator over these GPUs."""
    assert cuda.module is not None
    try:
        found = cuda.module.communicator_properties(_native.nccl_wheel(), list(numbers))
    except RuntimeError as error:
        return dict.fromkeys(_OF_COMMUNICATOR, Answer(None, f"NCCL could not create a communicator: {error}"))
    whose = f"by a communicator of {len(numbers)} GPU(s) of this process"
    kind, railed = (_GIN_KINDS.get(found[key], f"kind {found[key]}") for key in ("gin", "railed_gin"))
    gin = Answer(True, f"{kind}, on rails {railed}, {whose}")
    if not found["gin_usable"]:
        gin = Answer(False, f"{kind}, on rails {railed}, but {_gin_problem(cuda) or 'it is needed between all GPUs'}")
    return {
        "windows": Answer(found["device_api"], whose),
        "LSA": Answer(found["device_api"], f"{found['num_lsa_teams']} team(s), {whose}"),
        "multimem": Answer(found["multimem"], whose),
        "GIN": gin,
    }


def capabilities(cuda: Cuda, devices: Sequence[jax.Device], communicator: bool) -> dict[str, Answer]:
    """One answer for each capability."""
    names = ("kernels", *_OF_COMMUNICATOR)
    xla = {"XLA collectives extension": _xla_collectives()}
    if cuda.obstacle:
        return dict.fromkeys(names, Answer(False, cuda.obstacle)) | xla
    numbers = [device.local_hardware_id for device in devices if device.platform == "gpu"]
    numbers = [number for number in numbers if number < cuda.num_devices]
    if not numbers:
        return dict.fromkeys(names, Answer(None, "JAX uses no GPU in this process")) | xla
    answers = {"kernels": _kernels(cuda, numbers)}
    if communicator:
        return answers | _queried(cuda, numbers) | xla
    answers |= dict.fromkeys(_OF_COMMUNICATOR, Answer(None, _UNKNOWN))
    if problem := _gin_problem(cuda):
        answers["GIN"] = Answer(False, problem)
    return answers | xla
