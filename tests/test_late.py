"""Other ranks wait for a rank that is alive but late. Meanwhile, a line on standard error names it."""

import re

import late
import pytest


def run(*launcher):
    done = late.outcome("psum", *launcher, JAXCOMM_WARN_S="0.4", LATE_S="2")
    assert done.returncode == 0 and "late: [[6.0]" in done.stdout, done.stdout + done.stderr
    warnings = re.findall(r"warning: jaxcomm: (psum at late\.py:\d+ \(body\): .*)", done.stderr)
    assert len(warnings) >= 2, done.stderr
    return warnings


@pytest.mark.parametrize("launcher", [(), ("-m", "jaxcomm.run", "--processes", "2", "--devices", "2")])
def test_late_device_is_waited_for(launcher):
    first, second, *_ = (line for line in run(*launcher) if "did not arrive" in line)
    end = " of the first of ranks [0]; an error follows after 600 s (JAXCOMM_TIMEOUT_S)"
    assert first.endswith("ranks [1] did not arrive within 0.4 s (JAXCOMM_WARN_S)" + end)
    assert second.endswith("ranks [1] did not arrive within 0.8 s" + end)


def test_late_process_is_waited_for():
    first, second, *_ = run("-m", "jaxcomm.run", "--processes", "2", "--devices", "1")
    for warning, time in ((first, "0.4 s (JAXCOMM_WARN_S)"), (second, "0.8 s")):
        absent = rf"ranks \[1\] .*, which did not enter the call within {re.escape(time)}"
        assert re.search(rf"in the entry barrier, ranks \[0\] .* waited for {absent}", warning)
        assert warning.endswith("; an error follows after 600 s (JAXCOMM_TIMEOUT_S)")


def test_device_that_never_arrives_is_named_and_the_next_run_works(tmp_path):
    done = late.outcome("missing", JAXCOMM_TIMEOUT_S="1", LATE_S="0", JAXCOMM_RECORDER=str(tmp_path))
    error = (
        r"late: error: DEADLINE_EXCEEDED: .*psum at late\.py:\d+ .*: ranks \[1\] did not arrive within 1 s \(JAXCOMM_TI"
    )
    assert re.search(error, done.stdout), done.stdout + done.stderr
    assert "in time: [[6.0], [6.0]]\n" in done.stdout
    assert done.stdout.endswith("failed: [('pmax', 0), ('psum', 0), ('psum', 1)]\n")
