"""A sweep: each combination in a process of its own, then one comparison and its page."""

# %% The same as `python -m runner -m …` in a shell; `!python -m runner -m …` in a notebook.
import json
import subprocess
import sys
from pathlib import Path

subprocess.run(
    [
        *(sys.executable, "-m", "runner", "-m", "data=cancer", "name=rates"),
        *("optimizer.lr=0.003,0.0003", "seed=0,1", "training.steps=60"),
    ],
    check=True,
)

# %% The numbers, for programs.
sweep = max(Path("outputs/sweeps/rates").iterdir())
comparison = json.loads((sweep / "comparison.json").read_text())
for row in comparison["rows"]:
    print(row["status"], *row["overrides"], round(row["summary"]["best"], 4))

# %% The page, for people: one file, which opens in a browser and can be sent.
print(sweep / "comparison.html")
