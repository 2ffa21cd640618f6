"""The house keeps its shape: what imports what, what does without torch, what explains itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Low to high. A module imports from the layers below its own and from its own package, and from
# nothing else of ours: not from its neighbours, not from above. A new module needs its place here.
CONFIGS = (
    "benchmark",
    "checkpoint",
    "checks",
    "data",
    "debug",
    "device",
    "distributed",
    "jobs",
    "models",
    "objectives",
    "optim",
    "record",
    "security",
    "stability",
    "sweep",
)
LAYERS = f"""
errors findings format masking module_path process_wait standard_streams
bounds count_limits fork_server parent_death
training.config {" ".join(f"{package}.config" for package in CONFIGS)}
record.storage
training.signals optim.origin random_state data.order models.preserved_state
device record
remaining
security
distributed.rank_info distributed.outcome distributed.world distributed.commit \
distributed.stacks
checkpoint
data.batch data.nested objectives.base
training.hook techniques.base
training.run
techniques.compiler objectives.model_output \
objectives.chunked_cross_entropy \
models.modes
training.best training.metrics training.recovery training.resume training.summary training.timing \
training.device_timing \
stability
checks.outputs
captures parity.flops
distributed.process_stats
training.baseline training.evaluation training.evidence training.first_call \
training.grace training.lost_folder training.step training.test_set \
training.trials training.last_state training.sanity \
benchmark.result
techniques hooks debug checks models objectives data optim training.loop \
distributed.batchnorm
distributed.parallel distributed.sharded
overrides
config
composing
training.length training.bad_samples table_report build_hooks distributed.join
build_data
build
doctor parity
replay benchmark
report
sweep
plugins jobs
distributed.agent distributed.rendezvous
distributed.rank
distributed.launch distributed.preload
verify
library
cli
__main__ __init__
""".strip().splitlines()

# A mistake in the config is answered before torch is imported, so these do without it.
TORCH_FREE = """
errors format bounds count_limits data.batch objectives.base training.hook techniques.base
training.run training.summary overrides.* config composing
cli.* __main__ __init__ *.__init__ *.config module_path security.config_* security.cli_overrides
security.registry sweep.* benchmark.result benchmark.arms report.*
""".split()


def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name below `runner`."""
    paths = sorted((ROOT / "runner").rglob("*.py"))
    return {".".join(p.relative_to(ROOT / "runner").with_suffix("").parts): p for p in paths}


def layer(module: str) -> int:
    part = module.split(".")[0]
    for depth, names in enumerate(LAYERS):
        if any(fnmatch(module, name) or part == name for name in names.split()):
            return depth
    raise AssertionError(f"runner.{module} has no place in LAYERS")


def imported(tree: ast.AST) -> Iterator[str]:
    """What a module imports of ours when it runs; imports for type checkers alone do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            found = [_module(node.module or "", alias.name) for alias in node.names]
        else:
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        yield from (name.removeprefix("runner.") for name in found if name.startswith("runner."))
        yield from imported(node)


def _module(package: str, name: str) -> str:
    """The module that `from package import name` names: below the package, or itself."""
    below = Path(ROOT, *package.split("."), f"{name}.py")
    return f"{package}.{name}" if below.exists() else package


def test_a_module_imports_only_lower_layers_and_its_own_package() -> None:
    wrong = [
        f"runner.{module} imports runner.{target}"
        for module, path in modules().items()
        for target in imported(ast.parse(path.read_text()))
        if target.split(".")[0] != module.split(".")[0] and layer(target) >= layer(module)
    ]
    assert wrong == []


def test_checking_a_config_imports_no_torch() -> None:
    names = [m for m in modules() if any(fnmatch(m, pattern) for pattern in TORCH_FREE)]
    assert {"cli.__init__", "config", "training.run", "data.config", "techniques.config"} <= set(
        names
    )
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    dotted = [f"runner.{m}".removesuffix(".__init__") for m in names]
    done = subprocess.run(
        [sys.executable, "-c", code, *dotted], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_config_file_begins_by_saying_what_it_is_for() -> None:
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    assert [p.name for p in files if not p.read_text().startswith("#")] == []


# Writing by name follows links in a run's folder; `record.storage` and `record.library_files` write
# safely. Allowed elsewhere: folders outside of runs, new temporary folders, and open files.
STORAGE = ("record.storage", "record.library_files")
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
    "benchmark.workers.pool": TEMPORARY,
    "checkpoint.snapshot": "save",  # torch.save to an open file
    "cli.launch": "rmtree rmdir",  # the run's folder itself, which this process has made
    "data.tokens": "memmap",  # read only
    "data.workers": TEMPORARY,
    "debug.memory": "_dump_snapshot",  # all four in a private folder
    "debug.profile": "export_chrome_trace",
    "device.memory": "write_text",  # /proc
    "distributed.launch": f"{TEMPORARY} rmdir",  # an empty folder
    "doctor.environment": f"{TEMPORARY} write_text",
    "jobs.export": "save",
    "jobs.replay": TEMPORARY,
    "library.trained": TEMPORARY,
    "models.hugging_face": "save_pretrained",
    "record.recorder": "save",  # PIL, to an open file
    "record.sinks.wandb_sink": "save",
    "record.tensorboard": "save",
    "report.tensorboard_server": f"{TEMPORARY} mkdir symlink_to unlink rmdir",  # in a temporary one
    "security.files.formats": "ZipFile",  # read only
    "sweep.study": "JournalFileBackend RDBStorage",  # after `refuse_links`
    "techniques.compiler": f"{TEMPORARY} mkdir unlink",  # the compiler's cache
    "verify.distributed": TEMPORARY,
    "verify.rerun": TEMPORARY,
    "verify.resume": TEMPORARY,
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
        text = ast.unparse(node.func)
        owner, _, name = text.rpartition(".")
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
