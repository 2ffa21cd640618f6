"""One process of a distributed run, from start to outcome."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch

from runner import rooms
from runner.core.build.setup import Components
from runner.core.checkpoint.ownership import folder_is_checked
from runner.core.config.run_config import RunConfig
from runner.core.device.capabilities import usable_cores
from runner.core.device.device import select
from runner.core.device.remaining import report_remaining
from runner.core.device.signals import interruption_before_run, raise_on_signals
from runner.core.errors import Interrupted, NotVerified, ProcessLost, UsageError
from runner.core.findings import CheckStatus, DoctorCheck
from runner.core.jobs import train
from runner.core.masking import mask_secrets
from runner.core.process_wait import die_with_parent
from runner.core.record.console import close_logging, restore_logging, set_up_logging
from runner.core.record.storage import guard_folder, make_folder
from runner.core.record.summary import Summary
from runner.core.record.text import escape_control_chars
from runner.core.schemas.device import DistributedConfig
from runner.core.schemas.jobs import JobKind
from runner.core.security.child_process import detach, end_with_parent
from runner.core.security.secrets import redact_errors
from runner.core.standard_streams import write_stream
from runner.scale.distributed.agent import block_signals, unblock_signals
from runner.scale.distributed.join import config_for_rank, gpu_uuid, join_world
from runner.scale.distributed.outcome import RANKS_FOLDER, RankOutcome
from runner.scale.distributed.rank_info import RankInfo
from runner.scale.distributed.world import World, as_lost, is_lost

log = logging.getLogger("runner")
STACKS_FOLDER = "debug/ranks"  # stacks of all threads of processes that waited too long


def run_rank_process(
    config: RunConfig, folder: Path, components: Components, place: RankInfo
) -> None:
    """Entry point of a new process: run its part and write the outcome for the agent."""
    detach()  # Ctrl-C of the terminal is forwarded by the agent, once
    os.environ.pop("PYTHONSAFEPATH", None)  # set for the fork server only
    if not _is_only_process(place):
        os.environ.update(place.environ())
    # a resumed run must not be disturbed; the kernel also kills stopped processes: see `preload.py`
    die_with_parent()
    end_with_parent(partial(os.kill, os.getpid(), signal.SIGKILL))
    outcome = _run_to_outcome(config, folder, components, place)
    if place.outcome_folder is not None:
        outcome.write(place.outcome_folder)
    exit_process(outcome.exit_code)


def run_follower(config: RunConfig, place: RankInfo) -> int:
    """Train as a rank other than 0 under torchrun or SLURM; returns the exit code.

    Rank 0 names the folder and has record and display; this process prints at most one line.
    """
    outcome = _run_to_outcome(config, None, None, place)
    if outcome.kind not in ("done", "interrupted"):
        sys.stderr.write(f"error: process {place.rank}: {escape_control_chars(outcome.message)}\n")
    return outcome.exit_code


def exit_process(code: int) -> None:
    """Exit at once if `code` is not 0, since the process group's threads would raise SIGABRT.

    Other processes may still be waiting in a collective. With code 0 it returns.
    """
    close_logging()
    for stream in (sys.stdout, sys.stderr):
        write_stream(stream)
    if code:
        os._exit(code)
    report_remaining(code)


def _run_to_outcome(
    config: RunConfig, folder: Path | None, components: Components | None, place: RankInfo
) -> RankOutcome:
    """Run this process's part, and return its outcome, however it ends."""
    outcome = RankOutcome(place.rank)
    try:
        with raise_on_signals(), redact_errors():
            try:
                unblock_signals()
                with folder_is_checked():
                    run_rank(config, folder, components, place)
            finally:
                block_signals()  # until the outcome is written
    except KeyboardInterrupt as error:
        cause = interruption_before_run(error, " before the first step")
        outcome = RankOutcome.from_error(place.rank, cause)
    except BaseException as error:
        outcome = RankOutcome.from_error(place.rank, as_lost(error) if is_lost(error) else error)
        restore_logging()
        if outcome.kind == "error" and outcome.exit_code == 1:
            for line in mask_secrets("".join(format_exception(error))).splitlines():
                log.error("  %s", line, extra={"live": True})  # not shown on the console
    outcome.message = mask_secrets(outcome.message)
    if place.rank:
        log.info("ended: %s", outcome.message or outcome.kind)
    return outcome


def run_rank(
    config: RunConfig, folder: Path | None, components: Components | None, place: RankInfo
) -> Summary | None:
    """Train as one of several processes; `folder` is the run's, as named by rank 0.

    Without `components`, rank 0 resolves `optimization=auto` here.
    """
    if folder is None:  # until rank 0 names it
        set_up_logging(config.monitoring.log_level, None, screen=False)
    else:
        _set_up_rank_logging(config, folder, place)
        if _is_only_process(place):
            config = replace(config, distributed=DistributedConfig())
            return train.main(config, folder, components)
    with ExitStack() as stack:
        world = join_world(config, place, stack)
        run_folder, resume = world.broadcast_choice(lambda: (folder, config.checkpoint.resume))
        if run_folder is None:
            raise UsageError("distributed: rank 0 sent no run folder")
        if folder != run_folder:
            _set_up_rank_logging(config, run_folder, place)
        config = replace(config, checkpoint=replace(config.checkpoint, resume=resume))
        if place.rank:  # rank 0 records for all
            log.info("process %d of %d on %s: pid %d, local rank %d, device %s, torch %s",
                     place.rank, place.size, world.host, os.getpid(), place.local_rank,
                     world.device, torch.__version__)  # fmt: skip
        world.write_stacks(run_folder / STACKS_FOLDER / f"{place.rank}.txt")
        if config.job.kind is JobKind.doctor:
            _run_doctor(config, run_folder, world)
            return None
        try:
            if components is None:
                resolve = partial(train.resolve_components, config, run_folder)
                components = world.broadcast_choice(resolve) or Components()
            return train.main(config, run_folder, replace(components, world=world))
        except ProcessLost as lost:
            if world.has_stalled_device:  # the interpreter's own exit could wait for the device
                atexit.register(exit_process, lost.exit_code)
            raise
        except (KeyboardInterrupt, Interrupted):
            if error := world.find_error():  # because of it torchrun signals this process
                raise error from None
            raise


def _is_only_process(place: RankInfo) -> bool:
    return place.by == "runner" and place.size == 1


def _run_doctor(config: RunConfig, folder: Path, world: World) -> None:
    with ExitStack() as scope:
        device = select(config_for_rank(config, world.place).device, scope)
        links = examine_links(world, device.torch)
        try:
            if world.is_rank_zero:
                rooms.find("job", "doctor", "job=doctor")(config, folder, links)
        except NotVerified:
            world.barrier()
            raise
        world.barrier()


def _set_up_rank_logging(config: RunConfig, folder: Path, place: RankInfo) -> None:
    log_folder = folder if place.rank == 0 else folder / RANKS_FOLDER / str(place.rank)
    guard_folder(folder)
    make_folder(log_folder)
    set_up_logging(config.monitoring.log_level, log_folder, screen=place.rank == 0)


# -- what job=doctor says of the processes ---------------------------------------------------------


@dataclass(frozen=True)
class LinkReport:
    """The processes of a run, and whether their all-reduce is right."""

    kind: str
    backend: str
    ranks: list[dict[str, Any]]  # host, device, versions
    wrong: int  # number of wrong sums

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the report's table."""
        yield "kind", f"{self.kind}, {len(self.ranks)} processes, {self.backend}"
        for rank, facts in enumerate(self.ranks):
            yield f"process {rank}", ", ".join(f"{k} {v}" for k, v in facts.items())

    def checks(self) -> Iterator[DoctorCheck]:
        """Yield checks of sums, cores and devices."""
        text = f"{self.wrong} sums are wrong" if self.wrong else "sums are right"
        fix = "run nccl-tests, or try distributed.backend=gloo"
        yield DoctorCheck.of("all-reduce", not self.wrong, text, fix, CheckStatus.fail)
        local_ranks = [facts for facts in self.ranks if facts["host"] == self.ranks[0]["host"]]
        cores, cpu = usable_cores(), local_ranks[0]["device"] == "cpu"
        text = f"{len(local_ranks)} processes on {cores} cores"
        fix = f"distributed.processes={cores}: each needs a core"
        yield DoctorCheck.of("cores", len(local_ranks) <= cores or not cpu, text, fix)
        local_gpus = {facts["gpu"] for facts in local_ranks if not cpu}
        have_own_gpu = cpu or len(local_gpus) == len(local_ranks)
        text = f"{len(local_ranks)} processes on {'the CPU' if cpu else f'{len(local_gpus)} GPUs'}"
        fix = "distributed.processes= at most the number of GPUs"
        yield DoctorCheck.of("devices", have_own_gpu, text, fix, CheckStatus.fail)


def examine_links(world: World, device: torch.device) -> LinkReport:
    """Describe the processes and check a sum; called by all, each gets the same result."""
    rank_facts = {
        "host": world.host,
        "device": str(device),
        **({"gpu": uuid} if (uuid := gpu_uuid(device.index)) else {}),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        "local rank": world.place.local_rank,
    }
    ones = torch.ones(1 << 18, dtype=torch.float32, device=device)
    total = world.all_reduce_sum(ones * (world.rank + 1))
    wrong = world.all_gather(int((total != world.size * (world.size + 1) / 2).any()))
    return LinkReport(world.kind, world.backend, world.all_gather(rank_facts), sum(wrong))
