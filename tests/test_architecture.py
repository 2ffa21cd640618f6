"""The house keeps its shape: what imports what, what does without torch, what explains itself."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.runs import python

ROOT = Path(__file__).resolve().parents[1]

# What each room may import besides itself. `rooms` and the version in `__init__` are for all.
ROOMS = {
    "core": "",
    "cli": "core scale",
    "datasets": "core",
    "measure": "core scale loops",
    "diagnose": "core loops",
    "scale": "core",
    "loops": "core",
    "scan": "core",
}
# The core, low to high; modules that lie in no folder are the lowest. A module imports from its
# own folder and from those below, not from its neighbours in a row and not from above.
LAYERS = """
interfaces
schemas
record
device
security
config
checkpoint
data
objectives
models
execution
optim
techniques
stability checks
train hooks captures
build
jobs
""".split("\n")[1:-1]

# Circles of imports within functions: the rare file of each pair is imported on demand.
LAZY_CIRCLES = [
    {"core.security.config_files", "core.security.outside_places"},
    {"core.train.device_timing", "core.train.timing"},
]

# A mistake in the config is answered before torch is imported, so these do without it.
TORCH_FREE = """
core.errors core.format core.bounds core.module_path
core.schemas.* core.interfaces.batch core.interfaces.objective core.interfaces.hook
core.interfaces.technique core.interfaces.run core.record.summary core.config.*
core.security.config_* core.security.cli_overrides core.security.registry
cli.* __main__ __init__ *.__init__ rooms report scale.sweep.*
measure.benchmark.result measure.benchmark.arms
measure.columns measure.comparison measure.comparison_row measure.curves measure.discover
measure.figures measure.naming measure.page measure.replicates measure.speed measure.svg
measure.sweep_speed measure.table measure.tensorboard_server measure.verdicts core.jobs.run_report
""".split()


def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name below `runner`."""
    paths = sorted((ROOT / "runner").rglob("*.py"))
    return {".".join(p.relative_to(ROOT / "runner").with_suffix("").parts): p for p in paths}


def layer(module: str) -> int:
    """The place of a module of the core in `LAYERS`, from 1; 0 for one that lies in no folder."""
    folder = module.split(".")[1]
    rows = [depth for depth, names in enumerate(LAYERS, 1) if folder in names.split()]
    if not rows:
        assert (ROOT / "runner" / "core" / f"{folder}.py").is_file(), f"{module} has no layer"
    return rows[0] if rows else 0


def imported(tree: ast.AST, types: bool = False) -> Iterator[str]:
    """What a module imports of ours when it runs, and for type checkers alone with `types`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            found = [_module(node.module or "", alias.name) for alias in node.names]
        else:
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        yield from (name.removeprefix("runner.") for name in found if name.startswith("runner."))
        yield from imported(node, types)


def _module(package: str, name: str) -> str:
    """The module that `from package import name` names: below the package, or itself."""
    below = Path(ROOT, *package.split("."), f"{name}.py")
    return f"{package}.{name}" if below.exists() else package


def test_a_room_imports_only_what_the_table_allows() -> None:
    found = set()
    for module, path in modules().items():
        room = module.split(".")[0]
        for target in imported(ast.parse(path.read_text()), types=True) if room in ROOMS else ():
            other = target.split(".")[0]
            if other in ROOMS and other != room and other not in ROOMS[room].split():
                found.add(f"{module} {target}")
    assert sorted(found) == []


def test_the_core_imports_only_lower_layers() -> None:
    found = set()
    for module, path in modules().items():
        for target in imported(ast.parse(path.read_text())):
            if not (module.startswith("core.") and target.startswith("core.")):
                continue
            own, other = layer(module), layer(target)
            same_folder = own == other and (not own or module.split(".")[1] == target.split(".")[1])
            if other >= own and not same_folder:
                found.add(f"{module} {target}")
    assert sorted(found) == []


def test_no_circle_of_imports_and_two_small_ones_within_functions() -> None:
    for lazy, circles in ((False, []), (True, LAZY_CIRCLES)):
        arrows: dict[str, set[str]] = {}
        for module, path in modules().items():
            tree = ast.parse(path.read_text())
            body = ast.Module([n for n in tree.body if lazy or not _is_definition(n)], [])
            arrows[module] = set(imported(body)) - {module}
        assert circles_of(arrows) == circles


def test_types_close_circles_of_few_modules_of_the_core() -> None:
    arrows = {}
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        body = ast.Module([n for n in tree.body if not _is_definition(n)], [])
        arrows[module] = set(imported(body, types=True)) - {module}
    # for type checkers alone: the parts of a run name it, and it names them
    circular = set().union(*circles_of(arrows))
    assert len(circular) <= 18
    assert {module.split(".")[0] for module in circular} == {"core"}


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def circles_of(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the largest sets of modules that all import each other, over others or directly."""
    below: dict[str, set[str]] = {}
    for start in arrows:
        below[start], pending = set(), [start]
        while pending:
            pending += (new := arrows.get(pending.pop(), set()) - below[start])
            below[start] |= new
    sets = {frozenset(m for m in below[n] if n in below.get(m, ())) for n in below if n in below[n]}
    return sorted(map(set, sets), key=min)


def test_few_modules_outside_of_scale_name_the_processes_of_a_run() -> None:
    lines = [
        module
        for module, path in modules().items()
        for line in path.read_text().splitlines()
        if re.search(r"\bworld\b", line) and not module.startswith("scale.")
    ]
    assert len(lines) <= 50
    assert len(set(lines)) <= 10


def test_checking_a_config_imports_no_torch() -> None:
    names = [m for m in modules() if any(fnmatch(m, pattern) for pattern in TORCH_FREE)]
    assert {"cli.__init__", "core.config.run_config", "core.schemas.data"} <= set(names)
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    done = python("-c", code, *(f"runner.{m}".removesuffix(".__init__") for m in names))
    assert done.returncode == 0, done.stderr


def test_every_config_file_begins_by_saying_what_it_is_for() -> None:
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    assert [p.name for p in files if not p.read_text().startswith("#")] == []


# Writing by name follows links in a run's folder; `core.record` has functions that write
# safely. Allowed elsewhere: folders outside of runs, new temporary folders, and open files.
STORAGE = ("core.record.storage", "core.record.library_files")
TEMPORARY = "TemporaryDirectory TemporaryFile mkdtemp"  # new, with a random name
WRITING_CALLS = f"""
{TEMPORARY} NamedTemporaryFile mkstemp write_text write_bytes mkdir makedirs touch rename renames
symlink symlink_to link link_to hardlink_to truncate unlink rmdir remove removedirs rmtree mknod
mkfifo copyfile copy copy2 copytree move savefig imsave to_csv to_json to_parquet save_file savez
tofile memmap save_pretrained save export_chrome_trace export_stacks _dump_snapshot
FileHandler FileStore SummaryWriter ZipFile GzipFile
JournalFileBackend RDBStorage CSVWriter ParquetWriter
""".split()
WRITERS_BY_NAME = {
    "measure.benchmark.workers.pool": TEMPORARY,
    "core.checkpoint.snapshot": "save",  # torch.save to an open file
    "cli.launch": "rmtree rmdir",  # the run's folder itself, which this process has made
    "datasets.tokens": "memmap",  # read only
    "core.data.workers": TEMPORARY,
    "diagnose.debug.memory": "_dump_snapshot",  # all four in a private folder
    "diagnose.debug.loop_trace": "export_chrome_trace",
    "diagnose.debug.profile": "export_chrome_trace",
    "core.device.memory": "write_text",  # /proc
    "scale.distributed.launch": f"{TEMPORARY} rmdir",  # an empty folder
    "diagnose.doctor": f"{TEMPORARY} write_text",
    "datasets.export": "save",
    "diagnose.replay.job": TEMPORARY,
    "datasets.trained": TEMPORARY,
    "datasets.hugging_face_model": "save_pretrained",
    "core.record.recorder": "save",  # PIL, to an open file
    "core.record.sinks.wandb_sink": "save",
    "core.record.tensorboard": "save",
    "measure.tensorboard_server": f"{TEMPORARY} mkdir symlink_to unlink rmdir",  # a temporary one
    "core.security.files.formats": "ZipFile",  # read only
    "scale.sweep.study": "JournalFileBackend RDBStorage",  # after `refuse_links`
    "core.techniques.compiler": f"{TEMPORARY} mkdir unlink",  # the compiler's cache
    "measure.verify.distributed": TEMPORARY,
    "measure.verify.rerun": TEMPORARY,
    "measure.verify.job": TEMPORARY,
}


def test_files_are_written_by_the_functions_that_follow_no_link() -> None:
    wrong, used = [], dict[str, set[str]]()
    for module, path in modules().items():
        for name, node in writing_calls(ast.parse(path.read_text())):
            if module not in STORAGE:
                used.setdefault(module, set()).add(name)
                if name not in WRITERS_BY_NAME.get(module, "").split():
                    wrong.append(f"runner.{module}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert wrong == []
    outdated = [module for module, names in WRITERS_BY_NAME.items() if module not in used]
    assert outdated == []  # the list is as short as it can be


def writing_calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls that write, rename or delete by name, with the function's last name."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {a.name for n in imports if not f"{n.module}".startswith("runner") for a in n.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if owner == "storage" or owner.endswith(("buffers", "frozen", "checkpointer")):
            continue  # ours
        if name == "open" and _opens_to_write(node, owner):
            yield name, node
        elif name == "replace" and (owner == "os" or len(node.args) == 1 and not node.keywords):
            if owner:  # Path.replace; str.replace has two arguments
                yield name, node
        elif name in ("copy", "move", "remove", "truncate") and owner not in ("os", "shutil"):
            continue  # of a list, a batch or an open file
        elif name in WRITING_CALLS and (owner or name in foreign):
            yield name, node


def _opens_to_write(node: ast.Call, owner: str) -> bool:
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if "os.devnull" in ast.unparse(node) or options.get("opener") == "safe_opener":
        return False
    if owner == "os":
        return any(flag in ast.unparse(node) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "flags"))
    is_function = owner in ("", "io", "gzip", "bz2", "lzma", "tarfile", "codecs")
    modes = [*map(ast.unparse, node.args[is_function:][:1]), options.get("mode", "")]
    if is_function and any(mode.isidentifier() for mode in modes):
        return True  # unknown
    texts = [mode.strip("'\"") for mode in modes]
    return any(set(text) & set("wax+") and set(text) <= set("rwaxbt+") for text in texts)
