"""Reads rank, number of processes, coordinator and GPUs of this process from a launcher's environment variables.

docs/guide/clusters.md lists the variables. JAX's variables override those of launchers.
"""

import dataclasses
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping

# Default ports of the coordinator: above Linux's range of ephemeral ports, which ends at 60999.
_FIRST_PORT, _NUM_PORTS = 61440, 4096

Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a job.

    Attributes:
      launcher: name of the launcher, for messages.
      rank, size: number of this process, and number of processes.
      local_rank, local_size: the same for the processes of this host; None if unknown.
      coordinator: host:port of process 0; None if unknown.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    coordinator: str | None = None


def _number(environment: Environment, *names: str) -> int | None:
    """Value of the first of these variables that is set."""
    for name in names:
        text = environment.get(name, "")
        if text:
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"jaxcomm.distributed.initialize: {name} must be a number, got {text!r}")
            return int(text)
    return None


def _port(environment: Environment, job: str) -> int:
    """Port of the coordinator: equal in all processes of a job, and probably another one in another job."""
    given = _number(environment, "JAX_COORDINATOR_PORT")
    return given if given is not None else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def first_host(node_list: str) -> str:
    """First host of one of Slurm's lists, such as "a[01-04,7]b[2-3],c"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def tasks_of_node(tasks_per_node: str, node: int) -> int | None:
    """Number of processes of one node, from Slurm's "2(x3),1"."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(repeat or 1)
    return counts[node] if node < len(counts) else None


def _ancestor(name: str) -> int | None:
    """Process id of the closest ancestor of this name."""
    pid = os.getpid()
    try:
        while pid > 1:
            command, _, rest = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if command.partition("(")[2] == name[:15]:
                return pid
            pid = int(rest.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _torchrun(environment: Environment) -> Process | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return None
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    port, own = _number(environment, "JAX_COORDINATOR_PORT"), _number(environment, "MASTER_PORT")
    if port is None and own is not None:
        # torchrun's own store listens on MASTER_PORT.
        port = own + 1 if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else own
    if rank is None or size is None or port is None:
        return None
    host = environment["MASTER_ADDR"]
    coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    local = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE")
    return Process("torchrun", rank, size, *local, coordinator)


def _open_mpi(environment: Environment) -> Process | None:
    rank, size = _number(environment, "OMPI_COMM_WORLD_RANK"), _number(environment, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    coordinator = f"127.0.0.1:{_port(environment, job)}" if job and local_size == size else None
    return Process("Open MPI", rank, size, local_rank, local_size, coordinator)


def _pmi(environment: Environment) -> Process | None:
    rank, size = _number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE")
    if rank is None or size is None:
        return None
    local_rank = _number(environment, "MPI_LOCALRANKID", "PALS_LOCAL_RANKID")
    local_size = _number(environment, "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")
    coordinator = None
    if local_size == size and (proxy := _ancestor("hydra_pmi_proxy")) is not None:
        coordinator = f"127.0.0.1:{_port(environment, str(proxy))}"
    return Process("MPICH", rank, size, local_rank, local_size, coordinator)


def _slurm(environment: Environment) -> Process | None:
    """Detects srun only. A batch script is one process, although it has SLURM_PROCID too."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if not nodes or rank is None or size is None:
        return None
    job = environment.get("SLURM_JOB_ID", "") + "." + environment.get("SLURM_STEP_ID", "")
    local_size = tasks_of_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environment, "SLURM_NODEID") or 0
    )
    coordinator = f"{first_host(nodes)}:{_port(environment, job)}"
    return Process("Slurm", rank, size, _number(environment, "SLURM_LOCALID"), local_size, coordinator)


def _jax(environment: Environment) -> Process | None:
    """Variables set by jaxcomm.run, by users, or by Kubernetes, whose indexed jobs number their pods."""
    size = _number(environment, "JAX_NUM_PROCESSES")
    if size is None:
        return None
    rank = _number(environment, "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
    return None if rank is None else Process("JAX_NUM_PROCESSES", rank, size)


# In order of precedence. Under mpirun in a Slurm job, and under srun with PMI, MPI's variables describe the process.
_LAUNCHERS: tuple[Callable[[Environment], Process | None], ...] = (_jax, _torchrun, _open_mpi, _pmi, _slurm)


def detect(environment: Environment) -> Process | None:
    """The process that the environment describes; None if no launcher has started it."""
    for launcher in _LAUNCHERS:
        if (process := launcher(environment)) is not None:
            if process.rank >= process.size:
                raise ValueError(
                    f"jaxcomm.distributed.initialize: {process.launcher} sets rank {process.rank} of {process.size} "
                    "processes; ranks must be below the number of processes"
                )
            return dataclasses.replace(
                process, coordinator=environment.get("JAX_COORDINATOR_ADDRESS") or process.coordinator
            )
    return None


def _visible_gpus(environment: Environment) -> int:
    """Number of NVIDIA GPUs that this process may use, found without the CUDA driver."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def local_devices(process: Process, environment: Environment) -> list[int] | None:
    """Local device ids of a process: an equal share of the visible GPUs. None means all of them.

    As in JAX, ids count the entries of CUDA_VISIBLE_DEVICES.
    """
    rank, size = process.local_rank, process.local_size
    if rank is None or size is None or size == 1:
        return None
    count = _visible_gpus(environment)
    on_node = _number(environment, "SLURM_GPUS_ON_NODE")
    if count < size or (on_node is not None and count < on_node):
        return None  # the launcher has bound GPUs to processes, or there are none
    each = count // size
    return list(range(rank * each, (rank + 1) * each))
