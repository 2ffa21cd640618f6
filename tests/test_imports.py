"""A plain run imports the core, and tools only when they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLAIN_RUN = """
import json, runpy, sys
sys.argv[1:] = ["training.steps=3", "hydra.run.dir=outputs/plain"]
try:
    runpy.run_module("runner", run_name="__main__")
except SystemExit:
    pass
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print("\\n" + json.dumps({name: file for name, file in files.items() if file}))
"""
# towards 100 modules and 10,000 lines; lower them whenever less is imported
MODULES, LINES = 162, 24_219
TOOLS = (
    "jinja2",
    "matplotlib",
    "runner.scale.sweep.launch",
    "runner.scale.sweep.job_starter",
    "runner.measure.benchmark.engine",
    "runner.diagnose.replay",
    "torch._dynamo",  # a second
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "runner.measure.parity",
)
TOOLS += ("runner.scan.scan", "runner.scan.sandbox", "runner.core.captures.writer")
TOOLS += (
    "runner.loops",
    "runner.core.config.diagnosis",
    "runner.diagnose.debug.memory",
    "runner.diagnose.debug.profile",
)


def test_a_plain_run_imports_the_core_alone(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", PLAIN_RUN], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    files = json.loads(made.stdout.splitlines()[-1])
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
    program = PLAIN_RUN.replace('"training.steps=3"', '"training.steps=3", "optimization=ultra"')
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "torch._dynamo" not in json.loads(made.stdout.splitlines()[-1])
