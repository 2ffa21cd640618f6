"""From gradients to new weights: optimizer, schedule, guard, clipping, average."""
