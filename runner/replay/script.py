"""reproduce.py: a short script that reopens the capture through the runner and makes the step."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

BAD = 3  # exit code of a script whose step is bad; 1 is Python's for an exception
TEMPLATE = '''"""Makes a captured step again: exits with {bad} if it is bad, with 0 if it is not.

Usage: python reproduce.py [folder of the capture]
"""

import sys
from pathlib import Path

sys.path += {paths!r}

from runner.captures.opening import open_capture
from runner.replay.attempt import attempt
from runner.replay.reopen import reopened

FINDING = {finding!r}
capture = open_capture(Path(sys.argv[1] if len(sys.argv) > 1 else {capture!r}))
with reopened(capture, trusted={trusted!r}, without={without!r}) as (run, batch):
    step = attempt(run, batch, capture)  # run.model and batch are as the step found them
print(f"loss {{step.loss}}, gradient norm {{step.grad_norm}}", step.error or step.failed)
print(f"bad: {{FINDING}}" if step.bad else "good")
sys.exit({bad} if step.bad else 0)
'''


def write_script(
    folder: Path, capture: Path, finding: str, trusted: Sequence[str], without: Sequence[str]
) -> Path:
    """Write `reproduce.py`; all that comes from a capture stands in it as a quoted string."""
    own = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    paths = [os.path.abspath(p) for p in sys.path if not os.path.abspath(p).startswith(own)]
    path = folder / "reproduce.py"
    text = TEMPLATE.format(
        bad=BAD,
        paths=paths,
        finding=finding,
        capture=str(capture.absolute()),
        trusted=list(trusted),
        without=sorted(without),
    )
    path.write_text(text, "utf-8")
    return path
