"""Hostile files by what they call: the ways from a pickle to code that have been published.

Families: the standard library's plain openings, what runs text, what looks up a name, other
readers of pickles, and functions of numpy, torch, pip, hydra and the runner itself. Sources: the
advisories of picklescan and fickling, the CVEs of torch and Hydra, arXiv 2508.19774.
"""

from __future__ import annotations

import marshal
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


def _run(module: str, attribute: str) -> Pieces:
    """A function that runs text."""
    return lambda m: call(stack_name(module, attribute), value(script(m)))


def _open(module: str, attribute: str) -> Pieces:
    """A function that makes the file it is given."""
    return lambda m: call(stack_name(module, attribute), value(m), value("w"))


def _make(module: str, attribute: str) -> Pieces:
    """A function that makes the folder it is given."""
    return lambda m: call(stack_name(module, attribute), value(m))


def _nested(module: str, attribute: str) -> Pieces:
    """A function that reads another pickle."""
    return lambda m: call(stack_name(module, attribute), value(_inner(m)))


def _path(marker: str) -> bytes:
    return call(name("pathlib", "PosixPath"), value(marker))


def _code(marker: str) -> bytes:
    code = marshal.dumps(compile(script(marker), "x", "exec"))
    return call(name("marshal", "loads"), value(code))


def _factory(marker: str) -> bytes:
    handlers = {"h": {"()": "os.mkdir", "path": marker}}
    root = {"handlers": ["h"]}
    config = {"version": 1, "disable_existing_loggers": False, "handlers": handlers, "root": root}
    return call(name("logging.config", "dictConfig"), value(config))


def _graph(marker: str) -> bytes:
    body = {"_code": "def forward(self):\n    pass\n"}
    return call(
        name("torch.fx.graph_module", "reduce_graph_module"),
        value(body),
        value(script(marker) + "\n"),
    )


CALLS: dict[str, Pieces] = {
    # plain openings
    "os": mkdir,
    "posix": _make("posix", "mkdir"),
    "makedirs": _make("os", "makedirs"),
    "open": _open("builtins", "open"),
    "io": _open("io", "open"),
    "_io": _open("_io", "open"),
    "fileio": _open("io", "FileIO"),
    "gzip": _open("gzip", "open"),
    "bz2": _open("bz2", "BZ2File"),
    "lzma": _open("lzma", "open"),
    "zipfile": _open("zipfile", "ZipFile"),
    "tarfile": _open("tarfile", "open"),
    "codecs": _open("codecs", "open"),
    "path": lambda m: call(stack_name("pathlib", "Path.touch"), _path(m)),
    "shutil": lambda m: call(name("shutil", "copyfile"), value("/dev/null"), value(m)),
    "wave": _open("wave", "open"),
    # other processes
    "system": lambda m: call(name("os", "system"), value(f"mkdir '{m}'")),
    "popen": lambda m: call(
        stack_name("os", "_wrap_close.close"), call(name("os", "popen"), value(f"mkdir '{m}'"))
    ),
    "subprocess": lambda m: call(name("subprocess", "check_output"), value(["mkdir", m])),
    "getoutput": lambda m: call(name("commands", "getoutput"), value(f"mkdir '{m}'")),
    "spawn": lambda m: call(name("os", "spawnlp"), value(0), value("mkdir"), value("x"), value(m)),
    "pty": lambda m: call(name("pty", "spawn"), value(["mkdir", m])),
    "uuid": lambda m: call(name("uuid", "_get_command_stdout"), value("mkdir"), value(m)),
    # what runs text
    "exec": _run("builtins", "exec"),
    "eval": lambda m: call(name("__builtin__", "eval"), value(f"__import__('os').mkdir({m!r})")),
    "timeit": lambda m: call(
        name("timeit", "timeit"), value(script(m)), value("0"), name("time", "time"), value(1)
    ),
    "cprofile": _run("cProfile", "run"),
    "profile": _run("profile", "run"),
    "bdb": lambda m: call(stack_name("bdb", "Bdb.run"), call(name("bdb", "Bdb")), value(script(m))),
    "trace": lambda m: call(
        stack_name("trace", "Trace.run"),
        call(name("trace", "Trace"), value(0), value(0)),
        value(script(m)),
    ),
    "console": lambda m: call(
        stack_name("code", "InteractiveInterpreter.runsource"),
        call(name("code", "InteractiveInterpreter")),
        value(script(m)),
    ),
    "marshal": lambda m: call(call(name("types", "FunctionType"), _code(m), value({}))),
    "interpreters": lambda m: call(
        name("_xxsubinterpreters", "run_string"),
        call(name("_xxsubinterpreters", "create")),
        value(script(m)),
    ),
    # what looks up a name, or calls what it is given
    "getattr": lambda m: call(
        call(
            name("builtins", "getattr"),
            call(name("builtins", "__import__"), value("os")),
            value("mkdir"),
        ),
        value(m),
    ),
    "importlib": lambda m: call(
        call(
            name("builtins", "getattr"),
            call(name("importlib", "import_module"), value("os")),
            value("mkdir"),
        ),
        value(m),
    ),
    "pkgutil": lambda m: call(call(name("pkgutil", "resolve_name"), value("os:mkdir")), value(m)),
    "pydoc": lambda m: call(call(name("pydoc", "locate"), value("os.mkdir")), value(m)),
    "partial": lambda m: call(call(name("functools", "partial"), name("os", "mkdir"), value(m))),
    "reduce": lambda m: call(name("functools", "reduce"), name("os", "mkdir"), value([m, 0o755])),
    "operator": lambda m: call(name("operator", "call"), name("os", "mkdir"), value(m)),
    "methodcaller": lambda m: call(
        call(name("operator", "methodcaller"), value("touch")), _path(m)
    ),
    "attrgetter": lambda m: call(
        call(call(name("operator", "attrgetter"), value("mkdir")), name("random", "_os")), value(m)
    ),
    "map": lambda m: call(
        name("builtins", "list"), call(name("builtins", "map"), name("os", "mkdir"), value([m]))
    ),
    "logging": _factory,
    "dotted": _make("random", "_os.mkdir"),
    "reexport": _make("shutil", "os.mkdir"),
    # readers of other pickles and files
    "pickle": _nested("pickle", "loads"),
    "_pickle": _nested("_pickle", "loads"),
    "lib2to3": lambda m: call(
        stack_name("lib2to3.pgen2.grammar", "Grammar.loads"),
        call(name("lib2to3.pgen2.grammar", "Grammar")),
        value(_inner(m)),
    ),
    "storage_loads": lambda m: call(
        name("torch.storage", "_load_from_bytes"), value(legacy(_inner(m)))
    ),
    # numpy, torch, hydra, pip and the runner, which are all installed
    "numpy_runstring": lambda m: call(
        name("numpy.testing._private.utils", "runstring"), value(script(m)), value({})
    ),
    "numpy_savetxt": lambda m: call(name("numpy", "savetxt"), value(m), value([1.0])),
    "numpy_memmap": lambda m: call(
        name("numpy", "memmap"), value(m), value("uint8"), value("w+"), value(0), value((1,))
    ),
    "numpy_os": _make("numpy", "lib._utils_impl.os.mkdir"),
    "torch_save": lambda m: call(name("torch", "save"), value({}), value(m)),
    "torch_from_file": lambda m: call(name("torch", "from_file"), value(m), value(True), value(4)),
    "torch_exec": lambda m: call(
        name("torch.jit.unsupported_tensor_ops", "execWrapper"),
        value(script(m)),
        value({}),
        value({}),
    ),
    "torch_env": lambda m: call(name("torch.utils.collect_env", "run"), value(f"mkdir '{m}'")),
    "torch_fx": _graph,
    "torch_os": _make("torch", "os.mkdir"),
    "torch_serialization": _make("torch.serialization", "os.mkdir"),
    "hydra_instantiate": lambda m: call(
        name("hydra.utils", "instantiate"), value({"_target_": "os.mkdir", "path": m})
    ),
    "hydra_method": lambda m: call(
        call(name("hydra.utils", "get_method"), value("os.mkdir")), value(m)
    ),
    "pip": _make("pip._internal.utils.misc", "ensure_dir"),
    "setuptools": _make("setuptools", "os.mkdir"),
    "runner_storage": lambda m: call(name("runner.record.storage", "make_folder"), _path(m)),
    "runner_text": lambda m: call(
        name("runner.record.storage", "replace_text"), _path(m), value("x")
    ),
}

# Readers that are not installed here: nothing fires, and they are refused by their names.
ABSENT = (
    ("joblib", "numpy_pickle.load"),
    ("dill", "loads"),
    ("dill._dill", "_create_function"),
    ("cloudpickle.cloudpickle", "_builtin_type"),
    ("cloudpickle", "loads"),
    ("keras", "Lambda"),
    ("sklearn.tree._tree", "Tree"),
    ("pandas", "read_pickle"),
    ("nt", "mkdir"),
    ("no_such", "f"),
)


def _write(pieces: Pieces, folder: Path, marker: Path) -> Path:
    """In a checkpoint that torch wrote."""
    path = folder / "model.pt"
    body = pieces(str(marker))
    old = b"commands\n" in body or b"__builtin__\n" in body  # names of Python 2, mapped below 3
    path.write_bytes(torch_zip(whole(body, protocol=2 if old else 4)))
    return path


def samples() -> list[Sample]:
    needs = {
        "pip": "pip",
        "setuptools": "setuptools",
        "lib2to3": "lib2to3",
        "interpreters": "_xxsubinterpreters",
    }
    found = [
        Sample(key, "call", partial(_write, pieces), TORCH, needs.get(key, ""))
        for key, pieces in CALLS.items()
    ]
    for module, attribute in ABSENT:
        pieces = _make(module, attribute)
        found.append(Sample(f"{module}.{attribute}", "absent", partial(_write, pieces)))
    return found
