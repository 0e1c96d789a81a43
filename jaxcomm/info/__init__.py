"""info(): versions, devices, links, capabilities and default algorithms of this process."""

import dataclasses
import importlib.metadata
import platform

import jax

from jaxcomm import _native
from jaxcomm.info import _capabilities, _collectives, _machine
from jaxcomm.info._capabilities import Answer, version


@dataclasses.dataclass(frozen=True)
class Info:
    """Result of info(). ``str()`` gives a readable summary.

    Attributes:
      versions: name -> version of jaxcomm and its dependencies, or the reason why one is missing.
      devices: descriptions of the devices of this process, in JAX's order.
      nvlink: links between the GPUs of this host, or the reason why they are unknown: lines of `nvidia-smi topo -m`.
      nics: descriptions of the ports of RDMA devices of this host.
      capabilities: name -> whether kernels and NCCL have it on the GPUs of this process, and the reason.
      collectives: op and bytes of the operand -> the default algorithm over the devices of this process, and the
        reason; empty for one device.
    """

    versions: dict[str, str]
    devices: tuple[str, ...]
    nvlink: tuple[str, ...]
    nics: tuple[str, ...]
    capabilities: dict[str, Answer]
    collectives: dict[str, str]

    def __str__(self) -> str:
        parts = {
            "versions": [f"{name:26} {text}" for name, text in self.versions.items()],
            "devices": list(self.devices),
            "NVLink": list(self.nvlink),
            "NICs": list(self.nics) or ["no device in /sys/class/infiniband"],
            "capabilities": [f"{name:26} {answer}" for name, answer in self.capabilities.items()],
            "collectives": [f"{call:32} {text}" for call, text in self.collectives.items()],
        }
        return "\n".join(line for title, lines in parts.items() for line in (title, *(f"  {text}" for text in lines)))


def _driver(cuda: _capabilities.Cuda) -> str:
    found = _native.kernel_driver()
    served = cuda.module.driver_version() if cuda.module else 0
    if not found and not served:
        return "no"
    return (found or "version unknown") + (f", serves CUDA {version(served, 1000)}" if served else "")


def _versions(cuda: _capabilities.Cuda) -> dict[str, str]:
    name, plugin = _capabilities.plugin()
    module = f"no: {cuda.problem}"
    if cuda.module:
        built = cuda.module.built()
        module = (
            f"CUDA {version(built['cuda'], 1000)}, headers of NCCL {version(built['nccl'])}, GIN for {built['gin']}, "
            f"architectures {built['architectures']}"
        )
    ffi = _native.ffi_version()
    nccl = f"no: {cuda.nccl_problem}" if cuda.module else "not searched for without the CUDA module"
    if cuda.nccl:
        nccl = f"{version(cuda.nccl['version'])} from {cuda.nccl['path']}"
    return {
        "python": platform.python_version(),
        "jaxcomm": importlib.metadata.version("jaxcomm"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "XLA FFI API": ".".join(map(str, ffi)) if ffi else "unknown",
        "CUDA plugin of JAX": f"{name} {plugin}" if name else "no: install jax[cuda13]",
        "CUDA module": module,
        "NVIDIA driver": _driver(cuda),
        "NCCL": nccl,
    }


def info(communicator: bool = False) -> Info:
    """Describes this process and its machine. Missing hardware is reported in the result; it raises no error.

    Starts JAX's back ends, as ``jax.devices()`` does, and loads NCCL if the CUDA module is installed.

    Args:
      communicator: create a temporary NCCL communicator over the GPUs of this process and query it. This takes seconds
        and some memory of each GPU. Without it, capabilities that depend on a communicator are unknown.

    Returns:
      An Info; print it.
    """
    try:
        devices = tuple(jax.local_devices())
        names = tuple(f"{device.id}: {device.platform}, {device.device_kind}" for device in devices)
    except RuntimeError as error:  # JAX_PLATFORMS names a back end that is missing
        devices, names = (), (f"none: {error}",)
    cuda = _capabilities.find_cuda()
    return Info(
        _versions(cuda),
        names,
        _machine.nvlink(),
        _machine.nics(),
        _capabilities.capabilities(cuda, devices, communicator),
        _collectives.defaults(devices),
    )
