"""Ranks of one run whose command torchrun or srun has started several times."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from runner.core.config.composing import typed
from runner.core.errors import ConfigError, UsageError
from runner.core.record import hydra_files
from runner.core.schemas.device import DistributedKind
from runner.core.schemas.jobs import JobKind
from runner.core.security.config_files import check_security_group

if TYPE_CHECKING:
    from runner.cli.preflight import Request
    from runner.scale.distributed.rank_info import RankInfo


def run_rank(config: DictConfig | None, request: Request, exit_at_once: bool = False) -> bool:
    """Run this process's part if it is a rank above 0; return whether it is.

    `config` is None for a sweep. After a failure the process exits at once with `exit_at_once`,
    else by SystemExit. After a restart by torchrun, rank 0 continues in its folder. Raises
    UsageError or ConfigError if each process would do the whole work.
    """
    place = _find_rank(config)
    if config is None or place is None:
        return False
    if place.rank == 0:
        if exit_at_once:
            request.notes += _continue_attempt(config, place)
        return False
    check_security_group(config, request.cli_overrides.security)
    from runner.scale.distributed import rank

    code = rank.run_follower(typed(config), place)
    if exit_at_once:
        rank.exit_process(code)
    elif code:
        sys.exit(code)
    return True


def _find_rank(config: DictConfig | None) -> RankInfo | None:
    """Return this process's place among several, or None if it is the only one."""
    from runner.scale.distributed.rank_info import detect_rank

    place = detect_rank()
    if place is None:
        return None
    started = f"{place.by} has started {place.size} processes"
    if config is None and place.size > 1:
        fix = "type it without: -m distributed=ddp distributed.processes=N starts each job's"
        raise UsageError(f"-m: {started}, and each would run the sweep; {fix}")
    if config is None:
        return None
    kind, job = config.distributed.kind, config.job.kind
    if kind is not DistributedKind.none and job not in (JobKind.benchmark, JobKind.verify):
        place.check(config.distributed.processes)
        return place
    if place.size > 1:
        fix = "add distributed=ddp, or start one process"
        fix = fix if job is JobKind.train else f"type job={job.name} without {place.by}"
        problem = f"is {kind.value}: {started}, and each would run the whole job"
        raise ConfigError("distributed", problem, fix)
    return None


def _continue_attempt(config: DictConfig, place: RankInfo) -> list[str]:
    """Make rank 0 continue in its folder after a restart by torchrun; return notes for the log.

    The same command would name a new folder, by the current time.
    """
    if not place.attempt:
        return []
    from runner.scale.distributed.launch import folder_before_restart

    folder = folder_before_restart(typed(config.copy()), place)
    if folder is None:
        return []
    with open_dict(config):
        config.hydra.run.dir = str(folder)
        if any(folder.glob("checkpoints/step_*")):
            config.checkpoint.resume = "auto"
            config.hydra.output_subdir = hydra_files.RESUMED
    return [f"started again by {place.by}, attempt {place.attempt}: continuing {folder}"]
