"""A plugin of pytest that writes the outcome of every test as a line of JSON at once, so that it survives a crash.

The file is $JAXCOMM_REPORTS/<process>.jsonl; ../runner.py reads it. `note` adds what is worth keeping beside tests.
"""

import json
import os
import pathlib


def _write(entry):
    path = pathlib.Path(os.environ["JAXCOMM_REPORTS"], os.environ.get("JAX_PROCESS_ID", "0") + ".jsonl")
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def note(key, value):
    """Adds a JSON value to the record."""
    _write({"note": key, "value": value})


def pytest_runtest_logstart(nodeid):
    _write({"test": nodeid.rpartition("/")[2], "outcome": "not ended"})


def pytest_runtest_logreport(report):
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped:
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "skipped"
    elif report.failed:
        reason = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)[-1000:]
    _write({"test": report.nodeid.rpartition("/")[2], "outcome": report.outcome, "reason": reason})
