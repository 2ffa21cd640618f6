"""A plain run imports the core, and tools only when they are asked for."""

import json
from pathlib import Path

from tests.runs import python

ROOT = Path(__file__).parent.parent
PLAIN_RUN = """
import json, runpy, sys
try:
    runpy.run_module("runner", run_name="__main__")
except SystemExit:
    pass
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print("\\n" + json.dumps({name: file for name, file in files.items() if file}))
"""
# towards 100 modules and 10,000 lines; lower them whenever less is imported
MODULES, LINES = 158, 23_700
TOOLS = (  # a second for torch._dynamo
    *("jinja2", "matplotlib", "torch._dynamo", "torch.distributed.tensor"),
    *("torch.utils.flop_counter", "runner.scale.sweep.launch", "runner.scale.sweep.job_starter"),
    *("runner.measure.benchmark.engine", "runner.measure.parity", "runner.diagnose.replay"),
    *("runner.scan.scan", "runner.scan.sandbox", "runner.core.captures.writer", "runner.loops"),
    *("runner.core.config.diagnosis", "runner.diagnose.debug.memory"),
    "runner.diagnose.debug.profile",
)


def imported(folder: Path, *typed: str) -> dict[str, str]:
    """The files of the modules that a short run imports, by name."""
    made = python("-c", PLAIN_RUN, "training.steps=3", *typed, folder=folder)
    assert made.returncode == 0, made.stderr
    files: dict[str, str] = json.loads(made.stdout.splitlines()[-1])
    return files


def test_a_plain_run_imports_the_core_alone(tmp_path: Path) -> None:
    files = imported(tmp_path)
    lines = {
        name: len(Path(file).read_text().splitlines())
        for name, file in files.items()
        if Path(file).is_relative_to(ROOT / "runner")
    }
    largest = sorted(lines, key=lambda name: -lines[name])[:30]
    over = "\n".join(f"{lines[name]:5} {name}" for name in largest)
    assert len(lines) > 50  # the checkout is what runs
    assert len(lines) <= MODULES, over
    assert sum(lines.values()) <= LINES, over
    assert not [name for name in files if name.startswith(TOOLS)]


def test_a_level_imports_no_compiler_for_a_run_too_short_for_it(tmp_path: Path) -> None:
    assert "torch._dynamo" not in imported(tmp_path, "optimization=ultra")
