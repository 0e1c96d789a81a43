"""Prints the lines of code per folder: `make size`.

Counts tracked source files only. A folder's rooms are its files, where a source and its header are one room. A row
includes the folders below it: it has the sum of their lines, and the rooms of the fullest one.
"""

import subprocess
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {".py", ".cc", ".h", ".cu", ".cuh", ".def"}
PARTS = {
    "product": ("ffi", "jaxcomm", "models", "benchmarks", "examples", "integrations"),
    "tests": ("tests",),
    "tools": ("tools",),
}


def tracked_sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if Path(name).suffix in SOURCES]
    return [path for path in paths if (ROOT / path).is_file()]  # a deleted file stays tracked until the next commit


def report(paths: list[Path]) -> str:
    """One row per folder of the first two levels, and the total of each part last."""
    lines: Counter[Path] = Counter()
    rooms: dict[Path, dict[Path, set[str]]] = defaultdict(lambda: defaultdict(set))  # row -> folder below it -> stems
    for path in paths:
        row = Path(*path.parent.parts[:2])
        lines[row] += (ROOT / path).read_bytes().count(b"\n")
        rooms[row][path.parent].add(path.stem)
    rows, totals = ["   lines  rooms  folder"], []
    for part, folders in PARTS.items():
        inside = [row for folder in folders for row in sorted(lines) if row.parts[:1] == (folder,)]
        rows += [f"{lines[row]:8,}  {max(map(len, rooms[row].values())):5}  {row}" for row in inside]
        totals.append(f"{sum(lines[row] for row in inside):8,}         {part}: {', '.join(folders)}")
    return "\n".join(rows + totals)


if __name__ == "__main__":
    print(report(tracked_sources()))
