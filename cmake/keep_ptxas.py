"""Compiler launcher: runs nvcc and writes the register and spill report of ptxas to <object>.ptxas."""

import re
import subprocess
import sys

# -Xptxas -v prints these lines for each kernel and architecture. Warnings and errors of ptxas begin differently.
_REPORT = re.compile(r"ptxas info|\s+\d+ bytes stack frame")


def main(command: list[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    lines = done.stderr.splitlines(keepends=True)
    kept = [line for line in lines if _REPORT.match(line)]
    sys.stderr.writelines(line for line in lines if not _REPORT.match(line))
    if "-o" in command and done.returncode == 0:
        with open(command[command.index("-o") + 1] + ".ptxas", "w") as report:
            report.writelines(kept)
    return done.returncode


sys.exit(main(sys.argv[1:]))
