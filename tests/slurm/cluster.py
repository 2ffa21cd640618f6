"""A SLURM cluster of one node on this machine: Debian's daemons, started by hand in a folder."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.runs import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
MUNGE = (("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed"), ("log-file", "log"))
WAIT_S = 60.0  # for a daemon that starts

# Without cgroups, accounting or a database; a user's process is a plain child of slurmd.
CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ReturnToService=2
JobRequeue=1
KillWait=5
RebootProgram=/bin/false
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

# What an accounting database would tell submitit, from what the controller remembers.
SACCT = """\
#!/bin/sh
echo 'JobID|State|NodeList'
scontrol --oneliner show job | awk '{
    for (i = 1; i <= NF; i++) { split($i, part, "="); value[part[1]] = part[2] }
    id = "ArrayJobId" in value ? value["ArrayJobId"] "_" value["ArrayTaskId"] : value["JobId"]
    print id "|" value["JobState"] "|" value["NodeList"]; delete value
}'
"""


def missing() -> str:
    """Why there can be no cluster here; "" where there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt install slurm-wlm munge)"
    return "" if os.getuid() == 0 else "slurmd here starts jobs as root alone"


@contextmanager
def started(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands talk to the cluster, which ends with the block."""
    host = socket.gethostname()
    places = {name: folder / name for name in ("munge", "state", "spool")}
    for place in places.values():
        place.mkdir(mode=0o755)
    conf = folder / "slurm.conf"
    ports = dict(zip(("controller", "daemon"), _free_ports(2), strict=True))
    conf.write_text(CONF.format(host=host, folder=folder, cpus=os.cpu_count(), **ports))
    sacct = folder / "bin" / "sacct"
    sacct.parent.mkdir()
    sacct.write_text(SACCT)
    sacct.chmod(0o755)
    path = f"{sacct.parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
    key = folder / "munge" / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    munge = [f"--{name}={folder}/munge/munge.{end}" for name, end in MUNGE]
    with ExitStack() as stack:
        commands = (
            ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
            ["slurmctld", "-D", "-c", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf), "-N", host],
        )
        for command in commands:
            stack.enter_context(_daemon(command, env, folder))
            if command[0] == "munged":
                wait_until((folder / "munge" / "munge.socket").exists, seconds=WAIT_S)
        wait_until(lambda: "idle" in _asked(["sinfo", "-h", "-o", "%T"], env), seconds=WAIT_S)
        try:
            yield env
        finally:
            subprocess.run(["scancel", "--signal=KILL", "--user=root"], env=env, timeout=20)
            wait_until(lambda: not _asked(["squeue", "-h"], env).strip(), seconds=WAIT_S)


@contextmanager
def _daemon(command: list[str], env: dict[str, str], folder: Path) -> Iterator[None]:
    with open(folder / f"{command[0]}.out", "wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _asked(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else "?"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
