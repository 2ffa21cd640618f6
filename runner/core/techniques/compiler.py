"""torch.compile as several techniques use it: cache, failures, messages and counters."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from runner.core.device import memory
from runner.core.device.capabilities import cpu_flags
from runner.core.errors import DataError
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.nested import out_of_range
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import RunBuilder
from runner.core.record.storage import user_cache
from runner.core.record.text import shorten

log = logging.getLogger("runner")

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# what the loader says of a library that a killed process left incomplete
DAMAGED_LIBRARY = re.compile(r"(/[^\s:]+): (?:file too short|invalid ELF header)")
NO_HOME = "no home folder for a cache: HOME is not set, and passwd has no entry for this user"
LOGGERS = ("torch", "torch._dynamo", "torch._inductor", "torch._functorch")
CODE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
FUNCTION_LINE = re.compile(r"function: '[^']*' \(([^()]+):(\d+)\)")
"""The line of user code that a compiler message names."""
CUDA_GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes that record CUDA graphs, and the same without them."""
TRACER_WARNINGS = "The .grad attribute of a Tensor that is not", ".*should not be instantiated"
"""Warnings caused by torch's own tracer (2.13)."""


@dataclass(eq=False)
class Compilation:
    """Compiled parts of a model; a mode that fails is replaced by the next, then by eager."""

    parts: list[nn.Module]
    modes: list[str]
    dynamic: bool | None = None  # sizes that may change
    mode: str = ""  # "": eager
    paused: tuple[str, list[Any]] | None = None  # the mode, and the compiled calls by part

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether outputs are overwritten by the next call: those of CUDA graphs are."""
        return self.mode in CUDA_GRAPH_MODES

    def start(self) -> None:
        """Compile at the next call, in the next mode, or run eagerly if none is left."""
        reset_counters()
        self.stop()
        self.mode = self.modes.pop(0) if self.modes else ""
        for part in self.parts if self.mode else ():
            _compile(part, self.mode, self.dynamic)

    def stop(self) -> None:
        """Return to eager."""
        self.mode = ""
        for part in self.parts:
            part._compiled_call_impl = None

    def set_enabled(self, run: Run, on: bool) -> None:
        """Switch between compiled and eager; compiled code is kept."""
        if on and self.paused is not None:
            self.mode, implementations = self.paused
            self.paused = None
            for part, implementation in zip(self.parts, implementations, strict=True):
                part._compiled_call_impl = implementation
        elif on and not self.mode:
            self.start()
        elif not on and self.mode:
            self.paused = self.mode, [part._compiled_call_impl for part in self.parts]
            self.stop()

    def restart_without_cuda_graphs(self) -> bool:
        """Compile again at the next call, without CUDA graphs; return whether there were any."""
        mode = self.mode or (self.paused[0] if self.paused is not None else "")
        modes = [mode, *self.modes] if mode else self.modes
        self.modes = list(dict.fromkeys(CUDA_GRAPH_MODES.get(m, m) for m in modes))
        enabled, self.paused = bool(self.mode), None
        self.stop()
        if enabled:
            self.start()
        return mode in CUDA_GRAPH_MODES

    def discard(self, run: Run) -> None:
        """Forget the compiled code of a technique that was rejected, and free its graphs."""
        self.paused = None
        free_graphs(run)

    def recover(self, run: Run, error: Exception) -> bool:
        """Try the next mode if the compiler failed; return whether the step may be repeated."""
        if not self.mode or not is_compiler_error(error):
            return False
        failed = self.mode
        self.start()
        why = log_compiler_error(error)
        reason = f"mode {failed} failed, {self.mode or 'eager'} instead: {why}"
        run.fallback_reasons["compile"] = reason
        log.warning("optimization.compile: %s", reason)
        return True


def _compile(part: nn.Module, mode: str, dynamic: bool | None) -> None:
    """Compile a module in place, also one of a torch class, which the tracer would skip.

    A bare nn.Sequential would silently stay eager (torch 2.13); here it is inlined.
    """
    if not type(part).forward.__module__.startswith("torch."):
        part.compile(mode=mode, dynamic=dynamic)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    part._compiled_call_impl = torch.compile(call, mode=mode, dynamic=dynamic)


def select_modes(mode: str, builder: RunBuilder) -> list[str]:
    """Return the modes to try. On a CPU max-autotune was 2 to 15 % slower than default."""
    first = mode
    if builder.cuda_graphs and mode in ("auto", "default"):
        first = "reduce-overhead"
    elif mode == "auto" and builder.device.kind == "cuda":
        from runner.core.techniques.cost import autotuning_mode

        first = builder.choose("optimization.compile.mode", lambda: autotuning_mode(builder))
    elif mode == "auto":
        first = "default"
    if first.startswith("max-autotune") and "TORCH_LOGS" not in os.environ:
        from torch._inductor import config as inductor_config
        from torch._inductor import select_algorithm

        quiet = inductor_config.patch(max_autotune_report_choices_stats=False)
        builder.scope.enter_context(quiet)
        before = select_algorithm.PRINT_AUTOTUNE
        builder.scope.callback(setattr, select_algorithm, "PRINT_AUTOTUNE", before)
        select_algorithm.PRINT_AUTOTUNE = False
    modes = [first, "default"]
    if builder.device.kind == "cuda" and (reason := several_backwards(builder)):
        if first in CUDA_GRAPH_MODES:
            builder.fallback_reasons["compile"] = f"mode {first} without CUDA graphs: {reason}"
        modes = [CUDA_GRAPH_MODES.get(mode, mode) for mode in modes]
    return list(dict.fromkeys(modes))


def several_backwards(builder: RunBuilder) -> str:
    """Return why a step has no CUDA graphs: each backward overwrites the last one's gradients."""
    if builder.micro_batch == builder.batch_size:
        return ""
    return f"micro-batches of {builder.micro_batch}: the step is several backward passes"


def replace_whole_step(run: Run, reason: str) -> None:
    """Give up the whole step's graph; later steps run in parts, compiled if requested."""
    run.fallback_reasons["whole_step"] = reason
    run.step_graph = None
    for switch in run.switches:
        if switch.name == "whole_step":
            switch.set_enabled(run, False)
    log.warning("optimization.whole_step: fell back: %s", reason)
    if run.compilation is not None and not run.is_rejected("compile"):
        run.compilation.set_enabled(run, True)


def drop_graphs(run: Run, reason: str) -> bool:
    """Drop the step's graph and CUDA graphs; whether there were any. The model compiles without."""
    techniques, graph = [switch.name for switch in run.switches], run.step_graph
    given_up = run.is_rejected("whole_step") or "whole_step" in run.fallback_reasons
    whole_step = (graph is not None or "whole_step" in techniques) and not given_up
    cuda_graphs = run.compilation is not None and run.compilation.restart_without_cuda_graphs()
    if cuda_graphs or (graph is not None and graph.uses_cuda_graphs):
        run.fallback_reasons["cuda_graphs"] = reason
    if whole_step:
        replace_whole_step(run, reason)
    if whole_step or run.compilation is not None:
        torch._dynamo.reset()  # frees their memory
    if graph is not None:
        graph.check()  # a wrong target before this step would go unnoticed
    return whole_step or cuda_graphs


def free_graphs(run: Run) -> None:
    """Free the memory of CUDA graphs; those in use are recorded again. It is the pool of all."""
    if run.device.kind == "cuda":
        torch._dynamo.reset()
        memory.free_caches(run.device)


def prepare(scope: ExitStack) -> None:
    """Reset the compiler, shorten its messages, and cache compiled code on disk."""
    from torch._functorch import config as functorch_config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    _shorten_messages(scope)
    scope.enter_context(warnings.catch_warnings())
    for message in TRACER_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # as in eager mode: else layers that opt out of autocast would get gradients in 16 bits
    scope.enter_context(functorch_config.patch({"backward_pass_autocast": "off"}))
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    reset_counters()
    before = os.environ.get(CACHE_VARIABLE)
    folder = str(_make_cache_folder(cache_folder(os.environ), scope))
    if folder != before:  # not the user's choice
        scope.callback(os.environ.__setitem__, CACHE_VARIABLE, before or default_cache_dir())
        os.environ[CACHE_VARIABLE] = folder


def reset_counters() -> None:
    """Reset the counters of `compilation_facts`."""
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


# -- failures and messages -------------------------------------------------------------------------


def is_compiler_error(error: Exception) -> bool:
    """Whether the compiler failed, not the code that it compiled."""
    from torch._dynamo.exc import TorchDynamoException

    # some of its errors are no TorchDynamoException, such as for too many recompiles
    is_dynamo_error = type(error).__module__ == TorchDynamoException.__module__
    if is_dynamo_error or isinstance(error, TorchDynamoException):
        return True
    return _traceback_contains(error, f"torch{os.sep}_inductor{os.sep}", "codecache")


def is_from_compiled_code(error: Exception) -> bool:
    """Whether the error was raised while compiled code ran."""
    return _traceback_contains(error, f"_inductor{os.sep}output_code.py")


def _traceback_contains(error: Exception, *parts: str) -> bool:
    """Whether a frame of the traceback is in a file with all `parts` in its path."""
    paths = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return any(all(part in path for part in parts) for path in paths)


def log_compiler_error(error: Exception) -> str:
    """Return a short text of a compiler error with the user's line; log all of it to run.log."""
    log.info("the compiler's message", exc_info=error, extra={"live": True})  # not on the screen
    text = f"{type(error).__name__}: {summarize_message(str(error))}"
    if path := _remove_damaged(str(error)):
        text += f"; {path} was damaged, as by a killed run, and is removed: the next run makes it"
    return text


def _remove_damaged(message: str) -> str:
    """Remove the library of the cache that the loader says is damaged; return its path, or ""."""
    match, folder = DAMAGED_LIBRARY.search(message), os.environ.get(CACHE_VARIABLE)
    if match is None or not folder:
        return ""
    if Path(folder).resolve() not in Path(match[1]).resolve().parents:
        return ""
    Path(match[1]).unlink(missing_ok=True)
    return match[1]


def summarize_message(text: str) -> str:
    """Return the first line of a compiler message, and the line of code that it names."""
    lines = [line.strip() for line in re.split(r"\n|\\n", text) if line.strip()] or [""]
    first = lines[0].partition(", consider setting")[0]
    if first.endswith(":"):  # an error raised by a backend
        first = " ".join([first, *lines[1:2]])
    code_lines = CODE_LINE.findall(text.partition("user code")[2])[-1:]
    code_lines = code_lines or FUNCTION_LINE.findall(text)
    where = f" ({code_lines[0][0]}:{code_lines[0][1]})" if code_lines else ""
    return f"{shorten(first, 200)}{where}"


def _shorten_messages(scope: ExitStack) -> None:
    """Show one line of each compiler message and log the whole to run.log, until the run closes.

    With TORCH_LOGS set, messages are left unchanged.
    """

    def log_shortened(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        log.log(record.levelno, "torch.compile: %s", summarize_message(text))
        log.info("torch.compile: %s", text, extra={"live": True})  # not on the screen
        return False

    if "TORCH_LOGS" in os.environ:
        return
    handlers = [h for name in LOGGERS for h in logging.getLogger(name).handlers]
    for handler in [h for h in handlers if type(h) is logging.StreamHandler]:  # torch's own
        handler.addFilter(log_shortened)
        scope.callback(handler.removeFilter, log_shortened)


# -- counters --------------------------------------------------------------------------------------


def compilation_facts() -> dict[str, Any]:
    """Return facts of compilation since `prepare`: graphs, breaks, recompiles, seconds, cache."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    compiled = get_compilation_metrics()
    forward = [metrics for metrics in compiled if metrics.co_name]
    recompiled = [metrics for metrics in forward if metrics.recompile_reason]
    breaks = [
        f"{metrics.co_filename}:{metrics.co_firstlineno}"
        for metrics in forward
        if str(metrics.co_name).startswith("torch_dynamo_resume_in_") and metrics not in recompiled
    ]
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    reasons = [*counters["unimplemented"], *counters["graph_break"]] if breaks else []
    details = {
        "broken_at": breaks[:10],
        "why_broken": [summarize_message(reason) for reason in reasons[:10]],
        "failed": [summarize_message(str(m.fail_reason)) for m in forward if m.fail_reason][:5],
        "why_recompiled": [shorten(str(m.recompile_reason), 200) for m in recompiled[:5]],
    }
    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "seconds": round(sum((metrics.duration_us or 0) for metrics in compiled) / 1e6, 2),
        "cache": "warm" if hits and not inductor["fxgraph_cache_miss"] else "cold",
        "graph_breaks": len(breaks),
        "recompiles": len(recompiled),
        **{name: texts for name, texts in details.items() if texts},
    }


def store_seconds(run: Run, facts: Mapping[str, Any]) -> None:
    """Store how long compilation took, for the break-even of later runs."""
    if run.gains is not None and facts["graphs"] and facts["seconds"]:
        run.gains.store("compilation", [facts["seconds"], os.environ.get(CACHE_VARIABLE, "")])


# -- out-of-range indices, which would end the process ---------------------------------------------


def add_token_check(builder: RunBuilder) -> None:
    """Refuse token ids beyond the vocabulary: on a CPU they would end a compiled process."""
    vocab = builder.sizes.vocab
    if builder.device.kind != "cpu" or vocab is None:
        return

    def check_ids(batch: Batch) -> Batch:
        ids: Any = batch[0]
        while isinstance(ids, tuple | list):
            ids = ids[0]
        if isinstance(ids, dict):
            ids = ids.get("input_ids")
        if out_of_range(ids, vocab):
            bounds = f"ids go from {int(ids.min())} to {int(ids.max())}"
            vocabulary = f"the vocabulary has {vocab} (data.vocab)"
            raise DataError(f"a token id is out of range: {bounds}, and {vocabulary}")
        return batch

    builder.placements.append(check_ids)


# -- hooks ----------------------------------------------------------------------------------------


def graph_obstacle(run: Run, eager: bool = False) -> str:
    """Return which hook observes every step and so prevents steps in one graph; "" if none does.

    With `eager`, only a hook that makes every step run uncompiled.
    """
    for hook in run.hooks:
        events = ("around", "on_gradients")  # not possible for a step in one graph
        observes = any(getattr(type(hook), event) is not getattr(Hook, event) for event in events)
        if hook.every == 1 and observes and (hook.eager or not eager):
            tool = getattr(hook, "name", "")  # debug tools have one, equal to their config key
            name = f"debug={tool}" if tool else type(hook).__name__
            slower = f"; debug.{tool}.every=50 avoids most of it" if tool else ""
            how = "uncompiled" if hook.eager else "in more than one graph"
            return f"{name} observes every step, which then runs {how}{slower}"
    return ""


def warn_graph_obstacle(run: Run) -> None:
    """Log a warning at the start if a hook prevents every step from being compiled."""
    compiled = run.step_graph is not None or (run.compilation is not None and run.compilation.mode)
    if compiled and (reason := graph_obstacle(run, eager=run.step_graph is None)):
        name = "compile" if run.step_graph is None else "whole_step"
        log.warning("optimization.%s: %s", name, reason)


# -- cache -----------------------------------------------------------------------------------------


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the cache folder: the user's TORCHINDUCTOR_CACHE_DIR, else one in `user_cache`.

    One per torch version and CPU flags: code compiled for another CPU's instructions may crash.
    None without a home folder.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    user_folder = environ.get(CACHE_VARIABLE)
    if user_folder and user_folder != default_cache_dir():  # torch itself sets it to its default
        return Path(user_folder)
    if (cache := user_cache(environ)) is None:
        return None
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    return cache / "compiled" / f"torch-{torch.__version__}-cpu-{flags}"


def cache_problem(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return why code, which will be executed, cannot be cached in the `folder`, or None."""
    if not os.access(folder, os.W_OK):
        return "is not writable"
    if str(folder) == environ.get(CACHE_VARIABLE):
        return None
    status = folder.stat()
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return "is writable by other users" if status.st_uid != os.getuid() or shared else None


def _make_cache_folder(folder: Path | None, scope: ExitStack) -> Path:
    """Create and return the folder, or a temporary one for this run if it cannot be used."""
    problem: str | None = NO_HOME
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            problem = cache_problem(folder, os.environ)
        except OSError as error:
            problem = f"cannot be created: {error.strerror}"
        if problem is None:
            return folder
        problem = f"{folder} {problem}"
    log.warning("%s; compiled code is not cached (%s=/path)", problem, CACHE_VARIABLE)
    return Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="runner-compiled-")))
