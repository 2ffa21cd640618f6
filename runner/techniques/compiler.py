"""What the techniques that compile share: the compiler, its cache, its faults and its counters."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runner.data.batch import Batch
from runner.errors import DataError
from runner.record.text import shorten
from runner.techniques.base import RunBuilder

log = logging.getLogger("runner")

CACHE = "TORCHINDUCTOR_CACHE_DIR"
CALLS = (
    re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\(\s*aoti_torch_(?:cpu|cuda)_(\w+)\("),
    re.compile(r"torch\.ops\.aten\.(\w+)\.\w+\("),
    re.compile(r"extern_kernels\.(\w+)\("),
)
"""Operators that generated code calls, as C++ and as Python."""
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
FUNCTION = re.compile(r"function: '[^']*' \(([^()]+):(\d+)\)")
"""A line of the user's code in a message of the compiler."""
OF_THE_TRACER = (
    "The .grad attribute of a Tensor that is not a leaf",
    ".*should not be instantiated",
)
"""Warnings that torch causes itself, by what its tracer looks at (2.13)."""


def missing(kind: str) -> str | None:
    """Why nothing can be compiled for this kind of device, or None."""
    if kind == "mps":
        return "torch.compile is experimental on MPS"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if kind == "cpu" and not shutil.which(compiler):
        return f"no C++ compiler on PATH (install {compiler}, or name one in CXX)"
    return None


def no_gradients_in_graphs() -> str | None:
    """Why this torch cannot trace `torch.autograd.grad` into a graph, or None."""
    import torch._dynamo.config as dynamo

    if hasattr(dynamo, "trace_autograd_ops"):
        return None
    import torch

    return f"torch {torch.__version__} cannot put a backward pass into a graph"


def allow_gradients_in_graphs(scope: ExitStack) -> None:
    """Switch that on until the run closes."""
    import torch._dynamo.config as dynamo

    # a Python number that changes from step to step would else be frozen (torch 2.13)
    for name in ("trace_autograd_ops", "specialize_float"):
        scope.callback(setattr, dynamo, name, getattr(dynamo, name))
        setattr(dynamo, name, True)


def prepare(scope: ExitStack) -> None:
    """Forget what other runs of this process compiled, and keep what is compiled on disk."""
    import torch
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    condense_warnings(scope)  # before the context below, which puts `showwarning` back
    scope.enter_context(warnings.catch_warnings())
    for message in OF_THE_TRACER:
        warnings.filterwarnings("ignore", message=message)
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    reset_counters()
    folder, default = cache_folder(os.environ), default_cache_dir()
    if str(folder) != os.environ.get(CACHE):  # not the user's choice
        scope.callback(os.environ.__setitem__, CACHE, default)
        os.environ[CACHE] = str(_make_cache(folder, scope))


def reset_counters() -> None:
    """Let `facts` be about what is compiled from here on."""
    import torch

    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def modes(asked: str, draft: RunBuilder) -> list[str]:
    """The mode to start with, and those to go down to."""
    first = asked
    if draft.cuda_graphs and asked in ("auto", "default"):
        first = "reduce-overhead"
    elif asked == "auto":
        first = "max-autotune-no-cudagraphs" if draft.device.kind == "cuda" else "default"
    return list(dict.fromkeys([first, "default"]))


def options(draft: RunBuilder, cpp_wrapper: bool) -> dict[str, Any]:
    """What the compiler is to do for the whole step."""
    if draft.device.kind == "cpu":
        return {"cpp_wrapper": cpp_wrapper}
    import torch

    first = modes("auto", draft)[0]
    return dict(torch._inductor.list_mode_options(first))


def is_at_fault(error: Exception) -> bool:
    """Whether it is the compiler that failed, and not what it compiled."""
    from torch._dynamo.exc import TorchDynamoException

    trail = error.__traceback__
    while trail is not None:
        path = trail.tb_frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}_inductor{os.sep}" in path and "codecache" in path:
            return True
        trail = trail.tb_next
    # some of its errors are no TorchDynamoException, such as that of too many recompiles
    theirs = type(error).__module__ == TorchDynamoException.__module__
    return theirs or isinstance(error, TorchDynamoException)


def was_running(error: Exception) -> bool:
    """Whether compiled code had begun to run when it was raised."""
    trail = error.__traceback__
    while trail is not None:
        code = trail.tb_frame.f_code
        if code.co_filename.endswith(f"_inductor{os.sep}output_code.py"):
            return True
        trail = trail.tb_next
    return False


def summarize_error(error: Exception) -> str:
    """The gist of a compiler's message, which goes on for pages, and the user's line it is about.

    The whole of it is written to run.log.
    """
    log.info("the compiler's message", exc_info=error, extra={"live": True})  # not on the screen
    return f"{type(error).__name__}: {summarize_message(str(error))}"


def summarize_message(text: str) -> str:
    """The first line of a message of the compiler, and the line of code that it is about."""
    lines = [line.strip() for line in re.split(r"\n|\\n", text) if line.strip()] or [""]
    first = lines[0].partition(", consider setting")[0]
    if first.endswith(":"):  # of what a backend raised
        first = " ".join([first, *lines[1:2]])
    trace = text.partition("user code")[2]
    places = PLACE.findall(trace)[-1:] or FUNCTION.findall(text)
    where = f" ({places[0][0]}:{places[0][1]})" if places else ""
    return f"{shorten(first, 200)}{where}"


_condensed = ExitStack()  # undoes it
_condensing = 0  # runs that are open, which may close in any order


def condense_warnings(scope: ExitStack) -> None:
    """Until the run closes: one line on the screen of what the compiler warns of, all in run.log.

    TORCH_LOGS, which asks for its messages as they are, leaves them so.
    """
    global _condensing
    if "TORCH_LOGS" in os.environ:
        return
    _condensing += 1
    scope.callback(_stop_condensing)
    if _condensing == 1:
        _start_condensing(_condensed)


def _stop_condensing() -> None:
    global _condensing
    _condensing -= 1
    if not _condensing:
        _condensed.close()


def _start_condensing(scope: ExitStack) -> None:
    before, theirs = warnings.showwarning, f"{os.sep}torch{os.sep}_dynamo{os.sep}"

    def show(message: Any, category: Any, filename: str, *rest: Any, **more: Any) -> None:
        if theirs in filename:
            _condense(logging.WARNING, str(message))
        else:
            before(message, category, filename, *rest, **more)

    scope.callback(setattr, warnings, "showwarning", before)
    warnings.showwarning = show
    for name in ("torch", "torch._dynamo", "torch._inductor", "torch._functorch"):
        logger = logging.getLogger(name)
        scope.callback(setattr, logger, "handlers", logger.handlers)
        # one that propagates is shown by the logger above it
        logger.handlers = [] if logger.propagate and name != "torch" else [_Condensed()]


class _Condensed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _condense(record.levelno, record.getMessage())


def _condense(level: int, text: str) -> None:
    log.log(level, "torch.compile: %s", summarize_message(text))
    log.info("torch.compile: %s", text, extra={"live": True})  # not on the screen


def kernels() -> dict[str, int]:
    """The operators that the code compiled since `prepare` calls, by name, and how often.

    A profiler does not see them where the calling code is compiled too.
    """
    from torch._inductor.codecache import PyCodeCache

    found: Counter[str] = Counter()
    for module in PyCodeCache.modules:
        source = Path(str(module.__file__)).read_text(errors="replace")
        for pattern in CALLS:
            found.update(f"aten::{name.removesuffix('_out')}" for name in pattern.findall(source))
    return dict(found)


def compilation_facts() -> dict[str, Any]:
    """What was compiled since `prepare`: graphs, breaks, recompiles, seconds, cold or warm."""
    import torch
    from torch._dynamo.utils import counters

    compiled = torch._dynamo.utils.get_compilation_metrics()
    forward = [c for c in compiled if c.co_name]
    failed = [c for c in forward if c.fail_reason]
    breaks = [
        f"{c.co_filename}:{c.co_firstlineno}"
        for c in forward
        if str(c.co_name).startswith("torch_dynamo_resume_in_") and not c.recompile_reason
    ]
    hits = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    found: dict[str, Any] = {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "seconds": round(sum((c.duration_us or 0) for c in compiled) / 1e6, 2),  # of compiling
        "cache": "warm" if hits and not counters["inductor"]["fxgraph_cache_miss"] else "cold",
        "graph_breaks": len(breaks),
        "recompiles": sum(1 for c in forward if c.recompile_reason),
    }
    if breaks:
        found["broken_at"] = breaks[:10]
        reasons = [*counters["unimplemented"], *counters["graph_break"]]
        found["why_broken"] = [summarize_message(reason) for reason in reasons[:10]]
    if failed:
        found["failed"] = [summarize_message(str(c.fail_reason)) for c in failed[:5]]
    again = [shorten(str(c.recompile_reason), 200) for c in forward if c.recompile_reason]
    if again:
        found["why_recompiled"] = again[:5]
    return found


def check_tokens(draft: RunBuilder) -> None:
    """Let no token id beyond the vocabulary reach compiled code on a CPU: it ends the process.

    There an index is checked inside a parallel region, and an error out of that is no exception.
    """
    vocab = draft.sizes.vocab
    if draft.device.kind != "cpu" or vocab is None:
        return

    def place(batch: Batch) -> Batch:
        ids = batch[0]
        while isinstance(ids, tuple | list):
            ids = ids[0]
        if isinstance(ids, dict):
            ids = ids.get("input_ids")
        if ids is not None and out_of_range(ids, vocab):
            raise DataError(
                f"a token id is out of range: ids go from {int(ids.min())} to {int(ids.max())}, "
                f"and the vocabulary has {vocab} (data.vocab)"
            )
        return batch

    draft.placements.append(place)


def out_of_range(indices: Any, limit: int) -> bool:
    """Whether any of them is below 0 or not below `limit`; 2 µs, and on a GPU the host waits."""
    import torch

    if not isinstance(indices, torch.Tensor) or not indices.numel():
        return False
    if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
        return False
    low, high = indices.aminmax()
    return bool(low.item() < 0 or high.item() >= limit)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where runs keep compiled code: the user's TORCHINDUCTOR_CACHE_DIR, else a folder of ours."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = environ.get(CACHE)
    if named and named != default_cache_dir():  # torch writes its default there by itself
        return Path(named)
    home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "runner" / "compiled"


def cache_problem(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Why runs cannot keep compiled code in `folder`, which is there, or None.

    What is in it is run, so a folder that the user did not name must be the user's alone to write.
    """
    if not os.access(folder, os.W_OK):
        return "cannot be written"
    if sys.platform == "win32" or str(folder) == environ.get(CACHE):
        return None
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    return None


def _make_cache(folder: Path, scope: ExitStack) -> Path:
    """The folder, made; one for this run alone where it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        problem = cache_problem(folder, os.environ)
        if problem is None:
            return folder
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    log.warning("%s %s; what is compiled is not kept for later runs", folder, problem)
    return Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="runner-compiled-")))
