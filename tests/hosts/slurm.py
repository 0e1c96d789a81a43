"""A cluster of Slurm on the hosts of netns: the daemons of Debian's slurm-wlm and munge, with a node on each host."""

import os
import pathlib
import re
import shutil
import time

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
LIMIT_S = 300
SBIN = "/usr/sbin:/sbin"
CONF = """
ClusterName=hosts
SlurmctldHost=host0
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SlurmdTimeout=10
KillWait=2
ReturnToService=2
NodeName=host[0-{last}] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP
"""


def why_not():
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") is None]
    return f"not installed: {', '.join(missing)} (slurm-wlm, munge)" if missing else ""


class Cluster:
    """Args: hosts of netns, and a folder of files and logs, whose path is short enough for a socket."""

    def __init__(self, hosts, folder):
        self._hosts, self.folder = hosts, pathlib.Path(folder)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(CONF.format(folder=folder, last=hosts.num_hosts - 1))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        files = [
            f"--{name}={folder}/munge.{name.split('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        self.run("munged", "--force", *files)
        self.run("slurmctld")
        for host in range(hosts.num_hosts):
            self.run("slurmd", host=host)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """The daemons end with their hosts."""

    def run(self, *argv, host=0):
        environment = ["env", f"PATH={os.environ['PATH']}:{SBIN}", f"SLURM_CONF={self.folder}/slurm.conf"]
        return self._hosts.run(host, [*environment, *argv])

    def sbatch(self, script, *options):
        """Returns the number of the job."""
        path = self.folder / "script"
        path.write_text(script)
        return self.run(
            "sbatch", "--parsable", f"--chdir={self.folder}", "--output=%j.out", *options, str(path)
        ).strip()

    def state(self, job):
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job)))

    def output(self, job):
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, job, until):
        """Waits for a state of the job, a text in its output, or a condition. Returns the output."""
        deadline = time.monotonic() + LIMIT_S
        while not (until() if callable(until) else until == self.state(job)["JobState"] or until in self.output(job)):
            state = self.state(job)
            assert time.monotonic() < deadline and state["JobState"] != "FAILED", f"{state}\n{self.output(job)}"
            time.sleep(0.2)
        return self.output(job)
