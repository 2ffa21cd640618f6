"""Read the rank of this process from the environment of torchrun or SLURM."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runner.core.errors import ConfigError, UsageError

LOOPBACK, LOCAL_NAMES = "127.0.0.1", ("localhost", "::1")
FIRST_PORT, PORT_COUNT = 20_000, 20_000  # port range, by job number


@dataclass(frozen=True)
class RankInfo:
    """One of `size` processes; `local_rank` and `local_size` count those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str  # of the store
    port: int
    hosted: bool  # the store is hosted by the agent; else rank 0 opens it
    attempt: int = 0  # number of restarts
    by: str = "torchrun"  # which launcher: torchrun, slurm or runner
    nodes: int = 1
    outcome_folder: Path | None = None  # where our agent reads how each process ends
    losses: tuple[tuple[str, str], ...] = ()  # reasons of restarts: (kind of fault, message)

    def check(self, processes: int | None) -> None:
        """Raise ConfigError if the config disagrees with the launcher."""
        if processes not in (None, self.local_size, self.size):
            started = f"{self.size} processes, {self.local_size} of them on this machine"
            problem = f"is {processes}, but {self.by} has started {started}"
            raise ConfigError("distributed.processes", problem, "leave it out")

    def environ(self) -> dict[str, str]:
        """Return the variables that torchrun sets, for user code."""
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
        values = self.rank, self.size, self.local_rank, self.local_size, self.address, self.port
        return dict(zip(names, map(str, values), strict=True))


def detect_rank(environ: Mapping[str, str] | None = None) -> RankInfo | None:
    """Return this process's place from the environment; None if it is a single process.

    Raises UsageError for an incomplete environment.
    """
    env = os.environ if environ is None else environ
    try:
        if int(env.get("WORLD_SIZE", 0)) > 0 and "RANK" in env:
            return _on_loopback(_read_torchrun(env), "LOCAL_WORLD_SIZE" in env)
        if int(env.get("SLURM_NTASKS", 0)) > 1 and "SLURM_STEP_ID" in env:
            return _on_loopback(_read_slurm(env))
    except (KeyError, ValueError) as error:
        subject = "environment variables of a distributed run"
        raise UsageError(f"{subject} are incomplete: {error}") from None
    return None


def _on_loopback(place: RankInfo, knows_local_size: bool = True) -> RankInfo:
    """Let processes on one machine meet at an address that no other machine reaches."""
    is_local = knows_local_size and place.local_size == place.size and place.nodes == 1
    is_local = (is_local or place.address in LOCAL_NAMES) and not place.hosted
    return replace(place, address=LOOPBACK) if is_local else place


def _read_torchrun(env: Mapping[str, str]) -> RankInfo:
    size = int(env["WORLD_SIZE"])
    return RankInfo(
        rank=int(env["RANK"]),
        size=size,
        local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
        local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        nodes=int(env.get("GROUP_WORLD_SIZE", 1)),
    )


def _read_slurm(env: Mapping[str, str]) -> RankInfo:
    job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_NTASKS"]).partition("(")[0]
    return RankInfo(
        rank=int(env["SLURM_PROCID"]),
        size=int(env["SLURM_NTASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        local_size=int(per_node.partition(",")[0]),
        address=env.get("MASTER_ADDR") or _first_host(env["SLURM_STEP_NODELIST"]),
        port=int(env.get("MASTER_PORT", FIRST_PORT + (job * 7 + step) % PORT_COUNT)),
        hosted=False,
        attempt=int(env.get("SLURM_RESTART_COUNT", 0)),
        by="slurm",
        nodes=int(env.get("SLURM_STEP_NUM_NODES", 1)),
    )


def _first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list such as `node[1-3,7]`, by scontrol."""
    if "[" not in nodes and "," not in nodes:
        return LOOPBACK if nodes == socket.gethostname() else nodes
    command = ["scontrol", "show", "hostnames", nodes]
    return subprocess.check_output(command, text=True).split()[0]  # noqa: S603  # no shell
