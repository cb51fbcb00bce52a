"""A SLURM of two nodes on this machine, in a directory of its own, for tests marked `slurm`.

Nodes are named by loopback addresses, so that their names resolve without a line in /etc/hosts, and each
claims four CPUs, whatever the machine has. `stop` ends the daemons that `start` started, and nothing else.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bounds import BOUND_SECONDS

from olmo_rl.run_lease import started

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")  # states of a job that may go on
NODES = ("127.0.0.1", "127.0.0.2")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=60
MinJobAge=100000
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """The programs of SLURM and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(slots=True)
class Cluster:
    """A running SLURM. `place`: its directory; `environ`: what its clients need."""

    place: Path
    environ: dict[str, str] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        self.environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.place / "slurm.conf")}
        (self.place / "state").mkdir()
        key = self.place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = {"key-file": key, "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.place / file}" for name, file in munge.items()]
        self._run("munged", "--force", f"--seed-file={self.place / 'munge.seed'}", *options)
        ports = _free_ports(3)
        text = CONFIGURATION.format(
            host=socket.gethostname(), place=self.place, ports=ports, user=getpass.getuser()
        )
        (self.place / "slurm.conf").write_text(text)
        self._run("slurmctld", "-c")
        for node in NODES:
            self._run("slurmd", "-N", node)
        self.until(lambda: len(self._daemons()) == 2 + len(NODES), "all daemons")
        self.until(lambda: self._run("sinfo", "-h", "-o", "%t %D").strip() == "idle 2", "two idle nodes")

    def _daemons(self) -> set[int]:
        """The daemons that have written their files of process ids, now or before."""
        texts = [path.read_text().strip() for path in self.place.glob("*.pid")]
        self._known |= {int(text) for text in texts if text}
        return self._known

    def stop(self) -> None:
        """End every job, then every daemon that was started here."""
        with suppress(AssertionError, OSError):
            self._run("scancel", "--full", f"--user={getpass.getuser()}")
            self.until(lambda: not self._run("squeue", "-h", "-t", "R,CG").strip(), "no running job")
        for pid in self._daemons():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 20
            while started(pid) is not None and time.monotonic() < deadline:
                time.sleep(0.1)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def submit(
        self,
        script: Path,
        *arguments: str,
        place: Path,
        options: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """`sbatch` from the directory `place` with further variables; the id of the job."""
        command = ("sbatch", "--parsable", *options, str(script), *arguments)
        return self._run(*command, cwd=place, environ=environ).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` prints of a job, or of one task of an array."""
        fields = self._run("scontrol", "show", "job", "-o", job)
        return dict(re.findall(r"(\w+)=(\S*)", fields))

    def run(self, *command: str) -> str:
        """A client of this cluster, which must end well; what it printed."""
        return self._run(*command)

    def ended(self, job: str, *, restarts: int | None = None) -> dict[str, str]:
        """Wait until a job has ended, after so many requeues at least."""

        def over() -> bool:
            known = self.job(job)
            if known["JobState"] in LIVE:
                return False
            return restarts is None or int(known["Restarts"]) >= restarts

        self.until(over, f"the end of job {job}")
        return self.job(job)

    def until(self, condition: object, what: str) -> None:
        """Wait for a condition."""
        assert callable(condition)
        deadline = time.monotonic() + BOUND_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.2)

    def _run(self, *command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            command,
            env={**self.environ, **(environ or {})},
            cwd=cwd or self.place,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr}"
        return done.stdout


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
