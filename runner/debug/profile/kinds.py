"""What kind of work an operator does, read from its name, and how the name is shown."""

from __future__ import annotations

import re

ATTENTION, CONVOLUTIONS, PRODUCTS = "attention", "convolutions", "matrix products"
GRAPHS = "compiled graphs"
KINDS = (  # the first that is found in a name counts
    (GRAPHS, re.compile(r"^(## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction)")),
    (ATTENTION, re.compile(r"attention|flash|fmha", re.IGNORECASE)),
    (CONVOLUTIONS, re.compile(r"conv(?!ert)", re.IGNORECASE)),
    (PRODUCTS, re.compile(r"mm$|bmm|matmul|gemm|linear|_int_mm|_scaled_mm|mkldnn", re.IGNORECASE)),
)
# marks in the names of kernels that run on tensor cores: cuBLAS, CUTLASS, cuDNN, flash attention.
# Read from names: the profiler does not count the cores' cycles.
TENSOR_CORES = re.compile(
    r"hmma|imma|gmma|tensorop|tensor\d+x\d+|xmma|s16816|s1688|s884|h16816|h1688|h884|nvjet"
    r"|flash_(fwd|bwd)|fmha|bf16gemm|mma_", re.IGNORECASE
)  # fmt: skip
CALL = re.compile(r"^## Call CompiledFxGraph (\S+) ##$")


def kind(name: str) -> str:
    """One of the kinds above; nothing for all others."""
    return next((kind for kind, marks in KINDS if marks.search(name)), "")


def shown(name: str) -> str:
    """An operator's name for a table: a graph's without the marks of the trace, its hash short."""
    call = CALL.match(name)
    return f"compiled graph {call[1][:8]}" if call else name
