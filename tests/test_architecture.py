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
training.signals optim.origin random_state data.order record.storage models.preserved_state
device record
security
distributed.rank_info distributed.outcome distributed.world distributed.commit
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
training.grace training.step training.test_set \
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
