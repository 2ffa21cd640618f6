"""The bad step as a script that needs torch, safetensors and the model's own class, and no runner.

reproduce.py               forward, loss and backward; exits with 3 and what the replay says if bad
reproduce/weights.safetensors, batch.pt
reproduce/model_code/      where the model is one of ours: the files it is made of
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runner.captures.opening import Capture
from runner.config import RunConfig
from runner.masking import masked
from runner.replay.construction import loss_code, model_code
from runner.run import Run
from runner.security.secrets import STANDS
from runner.seeds import mix

FILES = "reproduce"
BAD = 3  # what a script exits with that found it bad; 1 is Python's for one that fell over
TEMPLATE = '''"""Makes step {step} of {name!r} again, without the runner; exits with 3 if it is bad.

{about}
"""

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

FILES = Path(__file__).resolve().parent / "{files}"
sys.path[:0] = [str(FILES)]
{paths}
{imports}

device = torch.device({device})
torch.set_num_threads({threads:d})
model = {model}
model.load_state_dict(load_file(FILES / "weights.safetensors"), strict={strict})
model.to(device).train()
saved = torch.load(FILES / "batch.pt", weights_only=True, map_location=device)
inputs, target = saved["inputs"], saved["target"]


def forward(inputs):
    call = {call}
{cast}    if isinstance(inputs, dict):
        return call(**inputs)
    return call(*inputs) if isinstance(inputs, (tuple, list)) else call(inputs)


def logits_of(output):
    """The tensor that the loss is taken of: the output, its `logits`, or the first of a tuple."""
    if isinstance(output, dict):
        output = output["logits"]
    output = getattr(output, "logits", output)
    output = output[0] if isinstance(output, (tuple, list)) else output
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def loss_of(output, target):
    return {loss}


def rows(value, which):
    if isinstance(value, dict):
        return {{key: rows(item, which) for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        return tuple(rows(item, which) for item in value)
    return value[which]


{noise}torch.manual_seed({seed:d})  # what the run seeds this step with
try:
{passes}except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
    sys.exit({exit})
gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()){unscaled}
print(f"loss {{loss:g}}, gradient norm {{norm:g}}")
bad = {bad}
print({found!r} if bad else "all is finite")
sys.exit({exit} if bad else 0)
'''


def write(
    run: Run, capture: Capture, config: RunConfig, folder: Path, found: str, compiled: bool
) -> Path | None:
    """The script for a run that stands before the bad step; None where the loss needs the runner.

    `found` is what the replay says of the step; `compiled` compiles the model.
    """
    loss = loss_code(run, config)
    if loss is None:
        return None
    files = folder / FILES
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    state = run.model.state_dict()
    kept = {n: t.detach().cpu().contiguous().clone() for n, t in state.items() if _tensor(t)}
    save_file(kept, files / "weights.safetensors")
    inputs, target = capture.batch
    random_state = _plain_noise(capture.random)
    torch.save({"inputs": inputs, "target": target, **random_state}, files / "batch.pt")
    model = model_code(config, run.sizes, files)
    paths = sorted({*model.paths, *loss.paths})
    imports = sorted({*model.imports, *loss.imports})
    autocast, cast = _precision(run, config)
    scale = 1.0 if run.update.scale is None else float(run.update.scale.value)
    path = folder / "reproduce.py"
    text = masked(
        TEMPLATE.format(
            step=int(capture.step), name=run.name, about=_about(capture, found), files=FILES,
            paths=f"sys.path += {paths}\n" if paths else "",
            imports="\n".join(imports) or "# all of it is torch's",
            device=_device(run), threads=capture.manifest.threads,
            model=model.expression,
            strict=len(kept) == len(state),
            call="torch.compile(model)" if compiled else "model", cast=cast, loss=loss.expression,
            noise=NOISE if random_state else "", seed=mix(run.seed, capture.step),
            passes=_passes(len(_first(target)), run.micro_batch, autocast, scale),
            unscaled="" if scale == 1.0 else f" / {scale}",
            found=f"bad: {found}" if found else "bad",
            exit=BAD,
            bad=_bad(capture),
        )
    )  # fmt: skip
    # what a config took from the environment, the script takes from there as well
    path.write_text(re.sub(f"'{STANDS.pattern}'", r'os.environ["\1"]', text), "utf-8")
    return path


def run_script(path: Path, timeout_s: float) -> tuple[int | None, str]:
    """Its exit code (None: not done in time) and the last line of what it says."""
    # files, since a pipe stays open for as long as anything that was started here holds it
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603  # what was just written, by this very python
            [sys.executable, str(path)], stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            cwd=path.parent, start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None, f"not done within {timeout_s:g} s"
        finally:  # also on Ctrl-C: with the workers of its data or its compiler
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (output, errors):
            file.seek(0)
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
            if lines:
                return code, lines[-1]
    return code, ""


NOISE = """version, numbers, gauss = saved["python"]
random.setstate((version, tuple(numbers), gauss))
kind, keys, *rest = saved["numpy"]
np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
"""


def _plain_noise(noise: Mapping[str, Any]) -> dict[str, Any]:
    """Python's and numpy's generators in lists and numbers."""
    version, numbers, gauss = noise["python"]
    kind, keys, *rest = noise["numpy"]
    numbers, keys = [int(n) for n in numbers], [int(k) for k in keys]
    return {"python": [version, numbers, gauss], "numpy": [kind, keys, *rest]}


def _bad(capture: Capture) -> str:
    norm = capture.grad_norm
    if norm is not None and capture.loss is not None and norm - norm == 0.0:
        if capture.loss - capture.loss == 0.0:
            return f"not norm < {norm / 2!r}  # half of what the run recorded"
    return "not (abs(loss) < float('inf') and norm < float('inf'))"


def _about(capture: Capture, found: str) -> str:
    said = f"The run recorded: {capture.manifest.message}."
    text = f"{said}\nThe replay found: {found}." if found else said
    return text.replace("\\", "/").replace('"""', "'''").replace("{", "(").replace("}", ")")


def _device(run: Run) -> str:
    """The run's device in code, and the CPU where the script finds no such one."""
    check = {"cuda": "torch.cuda.is_available()", "mps": "torch.mps.is_available()"}
    kind = run.device.torch.type
    return f'"{kind}" if {check[kind]} else "cpu"' if kind in check else f'"{kind}"'


def _passes(samples: int, micro: int, autocast: str, scale: float) -> str:
    """Forward and backward of the batch, or of one micro-batch after the other."""
    scaled = "one" if scale == 1.0 else f"(one * {scale})"
    if micro >= samples:
        within = f"    with {autocast}:\n        " if autocast else "    "
        return AT_ONCE.format(within=within, scaled=scaled)
    within = f"with {autocast}:\n            " if autocast else ""
    return IN_PARTS.format(
        samples=samples, parts=-(-samples // micro), within=within, scaled=scaled
    )


AT_ONCE = """{within}one = loss_of(forward(inputs), target)
    {scaled}.backward()
    loss = float(one.detach())
"""
IN_PARTS = """    samples, loss = {samples:d}, 0.0
    for i in range({parts:d}):  # a micro-batch at a time
        part = slice(-(-samples * i // {parts:d}), -(-samples * (i + 1) // {parts:d}))
        {within}one = loss_of(forward(rows(inputs, part)), rows(target, part))
        one = one * ((part.stop - part.start) / samples)
        {scaled}.backward()
        loss += float(one.detach())
"""


def _precision(run: Run, config: RunConfig) -> tuple[str, str]:
    """What stands around forward and loss, and what is cast for `pure`."""
    amp = config.optimization.amp
    if not any(name == "amp" for name, _ in run.techniques):
        return "", ""
    if amp.pure:
        return "", PURE
    dtype = "float16" if run.update.scale is not None else "bfloat16"
    return f"torch.autocast(device.type, dtype=torch.{dtype})", ""


PURE = """    for module in model.modules():  # BatchNorm stays in float32
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)
    inputs = rows(inputs, slice(None))
    low = lambda x: x.bfloat16() if x.is_floating_point() else x
    if isinstance(inputs, dict):
        inputs = {key: low(item) for key, item in inputs.items()}
    else:
        inputs = tuple(map(low, inputs)) if isinstance(inputs, tuple) else low(inputs)
"""


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _first(target: Any) -> Any:
    while isinstance(target, dict | tuple | list):
        target = next(iter(target.values() if isinstance(target, dict) else target))
    return target
