"""The default run, written by hand in one file: what `python -m runner` is timed against.

The same data, model, schedule, clipping, length, validation and checkpoints; no guard, no resume,
no record but what is printed.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

EPOCHS, BATCH, LR, WARMUP = 20, 32, 1e-3, 0.05

folder = Path(sys.argv[1])
most = int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize  # steps
torch.manual_seed(0)
data = np.load(Path(__file__).parents[1] / "runner" / "core" / "data" / "files" / "digits.npz")
x = torch.from_numpy(data["images"].astype(np.float32) / 16).view(-1, 64)
y = torch.from_numpy(data["labels"].astype(np.int64))
order = torch.randperm(len(x))
x, y = x[order], y[order]
held_out = len(x) // 5
train_x, train_y, val_x, val_y = x[held_out:], y[held_out:], x[:held_out], y[:held_out]

model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
steps_per_epoch = -(-len(train_x) // BATCH)
total, step = min(EPOCHS * steps_per_epoch, most), 0
warm = int(WARMUP * total)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda s: (
        (s + 1) / (warm + 1)
        if s < warm
        else 0.5 * (1 + math.cos(math.pi * (s - warm) / (total - warm)))
    ),
)
for _ in range(EPOCHS):
    model.train()
    for rows in torch.randperm(len(train_x)).split(BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train_x[rows]), train_y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        step += 1
        if step == total:
            break
    model.eval()
    with torch.no_grad():
        accuracy = (model(val_x).argmax(1) == val_y).float().mean()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt"
    )
    print(f"loss {loss.item():.4f}  accuracy {accuracy.item():.4f}")
    if step == total:
        break
