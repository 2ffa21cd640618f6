"""A training loop of your own with the guard: a bad batch costs one step, not the run."""

# %% Data, model, optimizer and loop are plain PyTorch.
import torch
from torch import nn

import runner

torch.manual_seed(0)
samples = torch.randn(2000, 64)
labels = (samples @ torch.randn(64, 10)).argmax(1)
batches = list(zip(samples.split(50), labels.split(50), strict=True))

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = nn.functional.cross_entropy

# %% One line in place of backward, clip_grad_norm_ and step; nothing waits for the device.
skipped = 0
for epoch in range(5):
    for i, (inputs, target) in enumerate(batches):
        if (epoch, i) == (3, 0):
            inputs = inputs * float("nan")  # what a broken sensor or file does
        step = runner.train_step(model, optimizer, (inputs, target), loss_fn)
        skipped += int(step.skipped)  # reading it waits; a real loop reads now and then

with torch.no_grad():
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
accuracy = right / sum(len(y) for _, y in batches)
print(f"accuracy {accuracy:.3f} after {5 * len(batches)} steps, {skipped} of them skipped")
