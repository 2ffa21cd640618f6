"""Every name that a config may use for a class, as text: looking one up imports nothing.

Names of torch are those of 2.11 to 2.13, by the module that defines them; a test holds them
against the torch that is installed. A name is good in its public place (`torch.nn.Linear`) and in
the one where it is defined (`torch.nn.modules.linear.Linear`).
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache

OURS = frozenset(
    f"runner.techniques.{name}"
    for name in (
        "accumulation.Accumulation",
        "amp.Amp",
        "attention.Attention",
        "channels_last.ChannelsLast",
        "chunked_loss.ChunkedLoss",
        "compile.Compile",
        "cuda_graphs.CudaGraphs",
        "fused_optimizer.FusedOptimizer",
        "pipeline.Pipeline",
        "quantization.Quantization",
        "recompute.Recompute",
        "system.System",
        "tf32.Tf32",
        "whole_step.WholeStep",
    )
)
_TORCH = {
    "torch.nn": {
        "modules.activation": "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh "
        "LeakyReLU LogSigmoid LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU "
        "Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold",
        "modules.adaptive": "AdaptiveLogSoftmaxWithLoss",
        "modules.batchnorm": "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d "
        "LazyBatchNorm3d SyncBatchNorm",
        "modules.channelshuffle": "ChannelShuffle",
        "modules.container": "Container ModuleDict ModuleList ParameterDict ParameterList "
        "Sequential",
        "modules.conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d "
        "LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d "
        "LazyConvTranspose3d",
        "modules.distance": "CosineSimilarity PairwiseDistance",
        "modules.dropout": "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout",
        "modules.flatten": "Flatten Unflatten",
        "modules.fold": "Fold Unfold",
        "modules.instancenorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d "
        "LazyInstanceNorm2d LazyInstanceNorm3d",
        "modules.linear": "Bilinear Identity LazyLinear Linear",
        "modules.linear_cross_entropy_options": "LinearCrossEntropyOptions",
        "modules.loss": "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss "
        "GaussianNLLLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss "
        "MSELoss MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss "
        "NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss "
        "TripletMarginWithDistanceLoss",
        "modules.module": "Module",
        "modules.normalization": "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm",
        "modules.padding": "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d "
        "ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d "
        "ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d",
        "modules.pixelshuffle": "PixelShuffle PixelUnshuffle",
        "modules.pooling": "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d "
        "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d "
        "FractionalMaxPool2d FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d "
        "MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d",
        "modules.rnn": "GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase",
        "modules.sparse": "Embedding EmbeddingBag",
        "modules.transformer": "Transformer TransformerDecoder TransformerDecoderLayer "
        "TransformerEncoder TransformerEncoderLayer",
        "modules.upsampling": "Upsample UpsamplingBilinear2d UpsamplingNearest2d",
        "parallel": "DataParallel",
        "parameter": "Buffer Parameter UninitializedBuffer UninitializedParameter",
    },
    "torch.optim": {
        "": "Adafactor Muon",
        "adadelta": "Adadelta",
        "adagrad": "Adagrad",
        "adam": "Adam",
        "adamax": "Adamax",
        "adamw": "AdamW",
        "asgd": "ASGD",
        "lbfgs": "LBFGS",
        "nadam": "NAdam",
        "optimizer": "Optimizer",
        "radam": "RAdam",
        "rmsprop": "RMSprop",
        "rprop": "Rprop",
        "sgd": "SGD",
        "sparse_adam": "SparseAdam",
    },
    "torch.utils.data": {
        "dataloader": "DataLoader",
        "dataset": "ChainDataset ConcatDataset Dataset IterableDataset StackDataset Subset "
        "TensorDataset",
        "distributed": "DistributedSampler",
        "sampler": "BatchSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler "
        "WeightedRandomSampler",
    },
    "torch.optim.lr_scheduler": {
        "": "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR "
        "ExponentialLR LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR "
        "PolynomialLR ReduceLROnPlateau SequentialLR StepLR",
    },
    "torch.optim.swa_utils": {"": "AveragedModel SWALR"},
}
ROOTS = ("torch.nn", "torch.optim", "torch.utils.data")
"""What may be imported for a name of torch."""

LAUNCHER = "hydra_plugins.runner_isolated.launcher.IsolatedLauncher"
CALLBACKS = frozenset({"hydra.experimental.callbacks.LogJobReturnCallback"})
_FORMAT = ("format", "fmt", "datefmt", "style", "validate", "defaults")
_COLOURS = ("log_colors", "secondary_log_colors", "reset", "no_color", "force_color", "stream")
_HANDLER = ("level", "formatter", "filters")
_FILE = (*_HANDLER, "filename", "mode", "encoding", "delay", "errors")
_RICH = ("show_time", "omit_repeated_times", "show_level", "show_path", "enable_link_path",
         "rich_tracebacks", "log_time_format", "keywords")  # fmt: skip
FORMATTERS: dict[str, tuple[str, ...]] = {
    "colorlog.ColoredFormatter": (*_FORMAT, *_COLOURS),
    "logging.Formatter": _FORMAT,
}
FILTERS: dict[str, tuple[str, ...]] = {"logging.Filter": ("name",)}
HANDLERS: dict[str, tuple[str, ...]] = {
    "logging.FileHandler": _FILE,
    "logging.NullHandler": _HANDLER,
    "logging.StreamHandler": (*_HANDLER, "stream"),
    "logging.handlers.RotatingFileHandler": (*_FILE, "maxBytes", "backupCount"),
    "logging.handlers.TimedRotatingFileHandler": (
        *_FILE, "when", "interval", "backupCount", "utc", "atTime",
    ),
    "logging.handlers.WatchedFileHandler": _FILE,
    "rich.logging.RichHandler": (*_HANDLER, *_RICH),
}  # fmt: skip
"""What writes to a terminal or a file, and nowhere else, with the keys that may be set of each: no
socket, no mail, no queue, and no object.
"""
LOGGING = frozenset({*FORMATTERS, *FILTERS, *HANDLERS})
SAMPLERS = frozenset(
    f"optuna.samplers.{name}"
    for name in (
        "CmaEsSampler", "GridSampler", "MOTPESampler", "NSGAIISampler", "QMCSampler",
        "RandomSampler", "TPESampler",
    )
)  # fmt: skip
"""What a sweeper that is installed may be handed."""


@cache
def torch_names() -> frozenset[str]:
    """Every name of a class of torch that passes."""
    found = set()
    for public, modules in _TORCH.items():
        for module, names in modules.items():
            inner = f"{public}.{module}" if module else public
            found |= {f"{place}.{name}" for name in names.split() for place in (public, inner)}
    return frozenset(found)


def root_of(target: str) -> str:
    """The package from which a name of the registry is imported; empty for any other name."""
    if target in OURS:
        return "runner"
    if target in torch_names():
        return next(root for root in ROOTS if target.startswith(f"{root}."))
    return ""


def nearest(target: str) -> str:
    """The name of the registry that was probably meant, or nothing."""
    name = target.rpartition(".")[2]
    found = get_close_matches(target, torch_names() | OURS, 1, 0.85)
    by_name = [known for known in sorted(torch_names()) if known.rpartition(".")[2] == name]
    return min(by_name, key=len) if by_name else (found[0] if found else "")
