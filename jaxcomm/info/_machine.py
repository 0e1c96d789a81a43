"""GPUs, their links and RDMA devices, as the operating system and nvidia-smi report them. No function raises."""

import pathlib
import re
import subprocess
import xml.etree.ElementTree as ElementTree

_LIMIT_S = 20  # nvidia-smi takes seconds on a machine with many GPUs, and may hang beside a broken driver
INFINIBAND = pathlib.Path("/sys/class/infiniband")
NO_FABRIC = "00000000-0000-0000-0000-000000000000"


def _smi(*arguments: str) -> tuple[str, str]:
    """(output of nvidia-smi, ""), or ("", reason why there is none)."""
    command = " ".join(("nvidia-smi", *arguments))
    try:
        done = subprocess.run(("nvidia-smi", *arguments), capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        return "", "there is no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command}: {error}"
    if done.returncode != 0:
        return "", f"{command}: {(done.stdout + done.stderr).strip() or f'status {done.returncode}'}"
    return done.stdout, ""


def driver() -> tuple[str, str]:
    """(version of NVIDIA's kernel driver, ""), or ("", reason why there is none)."""
    text, problem = _smi("--query-gpu=driver_version", "--format=csv,noheader")
    if versions := text.split():
        return versions[0], ""
    return "", problem or "nvidia-smi lists no GPU"


def _fabrics() -> list[str]:
    """NVSwitch fabrics that the GPUs belong to. A fabric may connect several hosts."""
    text, _ = _smi("-q", "-x")
    try:
        gpus = ElementTree.fromstring(text).iter("gpu") if text else []
    except ElementTree.ParseError:
        return []
    found = []
    for gpu in gpus:
        state, cluster, clique = (
            (gpu.findtext(f"fabric/{name}") or "").strip() for name in ("state", "clusterUuid", "cliqueId")
        )
        if state == "Completed" and cluster not in ("", "N/A", NO_FABRIC):
            found.append(f"cluster {cluster} clique {clique}")
    return sorted(set(found))


def _links(text: str) -> dict[int, dict[int, str]]:
    """GPU -> GPU that NVLink connects it with -> links, such as "NV18"; from the output of `nvidia-smi topo -m`."""
    rows = [line.split("\t") for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    header: list[str] = []
    found: dict[int, dict[int, str]] = {}
    for row in rows:
        cells = [cell.strip() for cell in row]
        if not header and "GPU0" in cells[1:]:
            header = cells
        elif header and (gpu := re.fullmatch(r"GPU(\d+)", cells[0])):
            peers = ((re.fullmatch(r"GPU(\d+)", name), cell) for name, cell in zip(header, cells, strict=False))
            found[int(gpu[1])] = {int(peer[1]): cell for peer, cell in peers if peer and cell.startswith("NV")}
    return found


def nvlink() -> tuple[tuple[tuple[int, ...], ...], str]:
    """Groups of GPUs of this host that NVLink connects, and a description or the reason why they are unknown."""
    text, problem = _smi("topo", "-m")
    if problem:
        return (), problem
    links = _links(text)
    if not links:
        return (), "nvidia-smi topo -m shows no GPU"
    groups: list[tuple[int, ...]] = []
    for gpu in links:
        if any(gpu in group for group in groups):
            continue
        group, new = {gpu}, {gpu}
        while new:
            new = {peer for member in new for peer in links.get(member, {})} - group
            group |= new
        groups.append(tuple(sorted(group)))
    kinds = sorted({kind for peers in links.values() for kind in peers.values()})
    names = "; ".join(
        f"GPUs {', '.join(map(str, group))}" if len(group) > 1 else f"GPU {group[0]} alone" for group in groups
    )
    return tuple(groups), "".join((names, f" ({', '.join(kinds)})" if kinds else "", *(f", {f}" for f in _fabrics())))


def nics() -> tuple[str, ...]:
    """Ports of RDMA devices: name, driver, state, rate, kind of link."""

    def read(path: pathlib.Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return "?"

    found = []
    try:
        for device in sorted(INFINIBAND.iterdir()):
            kind = (device / "device" / "driver").resolve().name
            for port in sorted((device / "ports").iterdir()):
                state, rate, layer = (read(port / name) for name in ("state", "rate", "link_layer"))
                found.append(f"{device.name} port {port.name}: {kind}, {state.rpartition(' ')[2]}, {rate}, {layer}")
    except OSError:
        pass  # no such folder, or a device that was just removed
    return tuple(found)
