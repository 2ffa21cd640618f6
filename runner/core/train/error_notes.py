"""What torch's errors of a step or a checkpoint mean in a run: the keys and sizes to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runner.core.device.device_errors import is_out_of_memory
from runner.core.errors import CheckpointError
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.nested import describe
from runner.core.interfaces.run import Run

SIZE_ERROR = re.compile("shape|size|input|dimension|dtype|should contain")
STATE_GROUPS = ("model.", "optimizer.", "optimization.", "data.")  # config that a state depends on
MAX_KEYS = 4  # in a message


def add_error_note(run: Run, batch: Batch, error: Exception) -> None:
    """Add a note to torch's error about sizes or a missing gradient."""
    text = str(error)
    if not isinstance(error, RuntimeError | ValueError) or is_out_of_memory(error):
        return
    if "does not require grad" in text:
        fix = "remove .detach() and torch.no_grad() from the forward of the model and from the loss"
        error.add_note(f"the loss depends on no weight that is trained; {fix}")
    elif SIZE_ERROR.search(text):
        sizes = ", ".join(f"{k}={v}" for k, v in run.sizes.for_constructor().items())
        fix = f"; a model._target_ of your own may take {sizes}" if sizes else ""
        error.add_note(f"data gives the model {describe(batch[0])}{fix}")


def name_changed_keys(
    error: CheckpointError, before: Mapping[str, str], settings: Mapping[str, Any]
) -> CheckpointError:
    """Return the error of a state that does not fit, with the keys that have other values now."""
    changed = [
        f"{key}={before[key]}, not {value}"
        for group in STATE_GROUPS
        for key, value in settings.items()
        if key.startswith(group) and before.get(key, str(value)) != str(value)
    ]
    return CheckpointError(f"{error}: {'; '.join(changed[:MAX_KEYS])}") if changed else error
