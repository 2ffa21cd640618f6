"""Hostile files by what they call: the ways from a pickle to code that have been published.

Sources: the advisories of picklescan and fickling, the CVEs of torch and Hydra, arXiv 2508.19774.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.files.archives import legacy, torch_zip
from tests.security.files.opcodes import call, name, stack_name, value, whole
from tests.security.files.sample import TORCH, Sample

Pieces = Callable[[str], bytes]  # from the marker's path


def mkdir(marker: str) -> bytes:
    return call(name("os", "mkdir"), value(marker))


def script(marker: str) -> str:
    return f"import os; os.mkdir({marker!r})"


def _inner(marker: str) -> bytes:
    return whole(mkdir(marker))


def _path(marker: str) -> bytes:
    return call(name("pathlib", "PosixPath"), value(marker))


# One call: `module:attribute`, by the arguments that it is given.
ARGUMENTS: dict[str, tuple[str, Callable[[str], tuple[bytes, ...]]]] = {
    "makes the folder": (
        "os:mkdir posix:mkdir os:makedirs random:_os.mkdir shutil:os.mkdir torch:os.mkdir "
        "numpy:lib._utils_impl.os.mkdir torch.serialization:os.mkdir setuptools:os.mkdir "
        "pip._internal.utils.misc:ensure_dir",
        lambda m: (value(m),),
    ),
    "makes the file": (
        "builtins:open io:open _io:open io:FileIO gzip:open bz2:BZ2File lzma:open "
        "zipfile:ZipFile tarfile:open codecs:open wave:open",
        lambda m: (value(m), value("w")),
    ),
    "runs text": (
        "builtins:exec cProfile:run profile:run",
        lambda m: (value(script(m)),),
    ),
    "runs text in a scope": (
        "numpy.testing._private.utils:runstring",
        lambda m: (value(script(m)), value({})),
    ),
    "runs text in two scopes": (
        "torch.jit.unsupported_tensor_ops:execWrapper",
        lambda m: (value(script(m)), value({}), value({})),
    ),
    "runs a command": (
        "os:system torch.utils.collect_env:run",
        lambda m: (value(f"mkdir '{m}'"),),
    ),
    "starts a program": (
        "subprocess:check_output pty:spawn",
        lambda m: (value(["mkdir", m]),),
    ),
    "reads a pickle": (
        "pickle:loads _pickle:loads",
        lambda m: (value(_inner(m)),),
    ),
    "reads a torch file": (
        "torch.storage:_load_from_bytes",
        lambda m: (value(legacy(_inner(m))),),
    ),
    "makes a file of ours": (
        "runner.record.storage:replace_text",
        lambda m: (_path(m), value("x")),
    ),
    "makes a folder of ours": ("runner.record.storage:make_folder", lambda m: (_path(m),)),
    "touches": ("pathlib:Path.touch", lambda m: (_path(m),)),
    "copies": ("shutil:copyfile", lambda m: (value("/dev/null"), value(m))),
    "saves": ("torch:save", lambda m: (value({}), value(m))),
    "writes numbers": ("numpy:savetxt", lambda m: (value(m), value([1.0]))),
    "maps a file": ("torch:from_file", lambda m: (value(m), value(True), value(4))),
    "instantiates": (
        "hydra.utils:instantiate",
        lambda m: (value({"_target_": "os.mkdir", "path": m}),),
    ),
    "reduces": ("functools:reduce", lambda m: (name("os", "mkdir"), value([m, 0o755]))),
    "calls": ("operator:call", lambda m: (name("os", "mkdir"), value(m))),
    "asks for a uuid": (
        "uuid:_get_command_stdout",
        lambda m: (value("mkdir"), value(m)),
    ),
}

# What a first call returns is called, or is the argument of a second.
CHAINS: dict[str, Pieces] = {
    "getattr": lambda m: call(
        call(
            name("builtins", "getattr"),
            call(name("importlib", "import_module"), value("os")),
            value("mkdir"),
        ),
        value(m),
    ),
    "pkgutil": lambda m: call(call(name("pkgutil", "resolve_name"), value("os:mkdir")), value(m)),
    "pydoc": lambda m: call(call(name("pydoc", "locate"), value("os.mkdir")), value(m)),
    "hydra": lambda m: call(call(name("hydra.utils", "get_method"), value("os.mkdir")), value(m)),
    "partial": lambda m: call(call(name("functools", "partial"), name("os", "mkdir"), value(m))),
    "methodcaller": lambda m: call(
        call(name("operator", "methodcaller"), value("touch")), _path(m)
    ),
    "map": lambda m: call(
        name("builtins", "list"), call(name("builtins", "map"), name("os", "mkdir"), value([m]))
    ),
    "bdb": lambda m: call(stack_name("bdb", "Bdb.run"), call(name("bdb", "Bdb")), value(script(m))),
    "console": lambda m: call(
        stack_name("code", "InteractiveInterpreter.runsource"),
        call(name("code", "InteractiveInterpreter")),
        value(script(m)),
    ),
    "popen": lambda m: call(
        stack_name("os", "_wrap_close.close"), call(name("os", "popen"), value(f"mkdir '{m}'"))
    ),
    "fx": lambda m: call(
        name("torch.fx.graph_module", "reduce_graph_module"),
        value({"_code": "def forward(self):\n    pass\n"}),
        value(script(m) + "\n"),
    ),
}

# Readers that are not installed here: nothing fires, and they are refused by their names.
ABSENT = (
    "joblib:numpy_pickle.load dill:loads dill._dill:_create_function cloudpickle:loads "
    "cloudpickle.cloudpickle:_builtin_type keras:Lambda sklearn.tree._tree:Tree pandas:read_pickle "
    "nt:mkdir no_such:f"
)


def _one_call(target: str, arguments: Callable[[str], tuple[bytes, ...]], marker: str) -> bytes:
    module, _, attribute = target.partition(":")
    return call(stack_name(module, attribute), *arguments(marker))


def _write(pieces: Pieces, folder: Path, marker: Path) -> Path:
    """In a checkpoint that torch wrote."""
    path = folder / "model.pt"
    path.write_bytes(torch_zip(whole(pieces(str(marker)), protocol=4)))
    return path


def samples() -> list[Sample]:
    found = [Sample(key, "call", partial(_write, pieces), TORCH) for key, pieces in CHAINS.items()]
    for targets, arguments in ARGUMENTS.values():
        for target in targets.split():
            needs = target.partition(":")[0].partition(".")[0]
            write = partial(_write, partial(_one_call, target, arguments))
            found.append(Sample(target, "call", write, TORCH, needs))
    for target in ABSENT.split():
        write = partial(_write, partial(_one_call, target, lambda m: (value(m),)))
        found.append(Sample(target, "absent", write))
    return found
