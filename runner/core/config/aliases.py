"""Names of keys, options and values in other programs, and their equivalents here."""

from __future__ import annotations

import re
from collections.abc import Container

OPTION_WORDS = {
    "debug": {
        "anomaly_detection": "anomaly",
        "profiling": "profile",
        "memory_profiling": "memory",
        "gradient_checking": "gradients",
        "full_debug": "full",
    },
    "optimization": {"compilation": "compile", "full_optimization": "full"},
}
"""By group: other words for options."""
_WORD = re.compile(r"[\w-]+")

KEY_ALIASES = {
    "training.epochs": "epochs max_epochs num_epochs n_epochs num_train_epochs epoch",
    "training.steps": "steps max_steps num_steps n_steps iterations max_iters",
    "training.batch_size": "batch_size bs batch train_batch_size per_device_train_batch_size",
    "training.micro_batch": "micro_batch_size microbatch_size train_micro_batch_size_per_gpu",
    "training.monitor": "metric_for_best_model monitor_metric early_stopping_metric",
    "training.validate_every": "val_check_interval eval_every eval_steps eval_interval",
    "training.patience": "patience early_stopping early_stopping_patience",
    "optimizer.lr": "lr learning_rate base_lr max_lr",
    "optimizer.weight_decay": "weight_decay wd decay l2",
    "+optimizer.options.betas": "betas",
    "+optimizer.options.eps": "eps epsilon adam_epsilon",
    "optimizer.ema": "ema_decay ema_rate",
    "optimizer=sgd optimizer.options.momentum": "momentum",
    "schedule.warmup": "warmup warmup_steps num_warmup_steps warmup_ratio",
    "optimizer": "optim optimiser opt",
    "schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type",
    "data": "dataset datamodule dataset_name",
    "data.path": "data_path data_dir dataset_path root train_file path file csv",
    "data.target": "target label label_column target_column",
    "data.workers": "num_workers workers dataloader_num_workers",
    "data.prefetch": "prefetch_factor dataloader_prefetch_factor",
    "data.pin_memory": "dataloader_pin_memory",
    "data.folds": "n_folds num_folds k_folds kfold n_splits",
    "data.validation": "val_split valid_split validation_split test_size",
    "data.validation_path": "validation_file val_path val_file eval_file dev_file",
    "data.test_path": "test_file",
    "model": "net network arch architecture backbone model_name model_type",
    "model.width": "width hidden hidden_size hidden_dim dim d_model n_embd embed_dim",
    "model.depth": "depth num_layers n_layers n_layer layers num_hidden_layers",
    "model.heads": "num_heads n_heads n_head nhead num_attention_heads",
    "model.dropout": "dropout_rate dropout_prob drop_rate",
    "model.weights": "weights init_from load_from pretrained_path model_name_or_path",
    "objective": "loss criterion loss_fn loss_function",
    "seed": "seed_everything random_seed manual_seed random_state",
    "device": "accelerator",
    "device.index": "gpu_id gpu_index device_id device_index cuda_device",
    "device.deterministic": "use_deterministic_algorithms deterministic_algorithms",
    "stability.clip_value": "grad_clip_value clip_grad_value gradient_clip_value",
    "stability.clip_norm": "clip_norm grad_clip clip_grad_norm gradient_clip_val max_grad_norm",
    "optimization": "optimization_level opt_level",
    "optimization.amp.enabled": "amp autocast mixed_precision",
    "optimization.compile.enabled": "compile torch_compile compile_model compilation",
    "optimization.recompute.enabled": "gradient_checkpointing activation_checkpointing"
    " use_checkpointing",
    "optimization.channels_last.enabled": "channels_last",
    "optimization.attention.enabled": "flash_attention flash_attn",
    "optimization.cuda_graphs.enabled": "use_cuda_graphs enable_cuda_graphs use_cuda_graph",
    "optimization.tf32.enabled": "allow_tf32 use_tf32 enable_tf32",
    "optimization.quantization.enabled": "quantize use_quantization enable_quantization int8",
    "optimization.fused_optimizer.enabled": "fused fused_adam",
    "checkpoint.resume": "resume ckpt_path resume_from resume_from_checkpoint checkpoint_path ckpt",
    "checkpoint.every": "save_every save_steps checkpoint_every save_interval",
    "checkpoint.keep": "save_total_limit save_top_k max_to_keep keep_last keep_last_n",
    "monitoring.progress": "progress_bar enable_progress_bar show_progress",
    "search.trials": "n_trials num_trials max_trials",
    "monitoring.every": "log_every log_every_n_steps logging_steps log_interval",
    "hydra.run.dir": "output_dir out_dir save_dir log_dir logdir default_root_dir",
    "name": "run_name exp_name experiment_name",
    "job": "task mode action",
    "training": "trainer train",
}
"""Our keys, and names in other programs with the same values, in any group; also after `use_`."""

_AMP = "optimization.amp.enabled=true optimization.amp.dtype"
_NO_AMP = "optimization.amp.enabled=false"
_PRECISION = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), f"{_AMP}=bf16"),
    **dict.fromkeys(("16", "fp16", "float16", "16-mixed"), f"{_AMP}=fp16"),
    **dict.fromkeys(("32", "fp32", "float32", "32-true", "no"), _NO_AMP),
}
_DEVICES = {
    "0": "device=cpu",
    "1": "device=cuda",
    **dict.fromkeys(("-1", "all", "auto"), "distributed=ddp"),
    "*": "distributed=ddp distributed.processes={value}",
}
_STRATEGIES = {
    **dict.fromkeys(("ddp", "dp", "ddp_spawn"), "distributed=ddp"),
    **dict.fromkeys(("fsdp", "deepspeed"), "distributed=fsdp"),
    **dict.fromkeys(("auto", "none", "single_device"), "distributed=none"),
}
_SINKS = {name: f"monitoring.sinks=[{name}]" for name in ("wandb", "mlflow")}
_VALUES = {
    "precision dtype mixed_precision amp amp_dtype": _PRECISION,
    "fp16": {"true": f"{_AMP}=fp16", "false": _NO_AMP},
    "bf16": {"true": f"{_AMP}=bf16", "false": _NO_AMP},
    "num_gpus n_gpus n_gpu gpus devices num_devices": _DEVICES,
    "num_processes nproc_per_node world_size": _DEVICES,
    "strategy distributed_backend": _STRATEGIES,
    "ddp": {"true": "distributed=ddp", "false": "distributed=none"},
    "fsdp": {"true": "distributed=fsdp", "false": "distributed=none"},
    "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps"
    " grad_accumulation_steps grad_accum gradient_accumulation": {
        "*": "training.micro_batch={micro_batch}"
    },
    "use_cuda use_gpu": {"true": "device=cuda", "false": "device=cpu"},
    "no_cuda use_cpu": {"true": "device=cpu", "false": "device=auto"},
    "detect_anomaly enable_anomaly_detection anomaly_detection": {
        "true": "debug=anomaly",
        "false": "debug=none",
    },
    "profile profiler profiling enable_profiling": {"false": "debug=none", "*": "debug=profile"},
    "enable_checkpointing": {"true": "checkpoint=default", "false": "checkpoint=off"},
    "fast_dev_run": {"true": "training=short"},
    "greater_is_better": {
        "true": "training.monitor_mode=max",
        "false": "training.monitor_mode=min",
    },
    "memory_format": {"channels_last": "optimization.channels_last.enabled=true"},
    "resume": {"true": "checkpoint.resume=auto", "false": "checkpoint.resume=none"},
    "logger report_to": _SINKS,
    **{name: {"true": sink} for name, sink in _SINKS.items()},
}
VALUE_ALIASES = {name: values for names, values in _VALUES.items() for name in names.split()}
"""Names in other programs with different values: overrides by value, `*` for any other one.

`{value}` is the value, `{micro_batch}` the batch size divided by it.
"""

_TRANSFORMER = "data=stdlib_text model=gpt"
OPTION_ALIASES = {
    "device": {"gpu": "device=cuda", "metal": "device=mps"},
    "debug": {"true": "debug=full", "all": "debug=full", "false": "debug=none"},
    "data": {"mnist": "data=digits", "csv": "data=tabular", "imagefolder": "data=images"},
    "model": {**dict.fromkeys(("gpt2", "transformer"), _TRANSFORMER), "resnet": "model=cnn"},
    "objective": {"mse": "objective=regression", "cross_entropy": "objective=classification"},
    "schedule": {
        "none": "schedule=constant",
        "cosineannealinglr": "schedule=cosine",
        "steplr": "schedule=step",
        "onecyclelr": "schedule=onecycle",
    },
    "job": {"fit": "job=train", "test": "job=evaluate", "eval": "job=evaluate"},
    "optimization": {"off": "optimization=none", "best": "optimization=auto"},
}
"""By group: options of other programs and the equivalent overrides."""

OPTION_KEYS = ("name", "type", "kind", "class", "arch")
"""`model.name=cnn` is `model=cnn` here."""

OPTION_BY_SUFFIX = {".csv": "tabular", ".tsv": "tabular", ".parquet": "tabular", ".npz": "arrays"}
"""The data option that reads a file, by suffix."""

TORCHVISION_PREFIXES = tuple("convnext densenet efficientnet mobilenet resnet swin vgg vit".split())
"""Prefixes of torchvision model names."""

TORCH_OPTIMIZERS = tuple(
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD"
    " SparseAdam".split()
)

_LOGGERS = "a run always writes metrics.jsonl, summary.json and TensorBoard; monitoring.* sets how"
_HOOKS = "early stopping is training.patience; a class of your own goes into debug.hooks"
_DEVICE = (
    "distributed.processes is the number of devices that train one model (distributed=ddp), "
    "device.index the number of a single one"
)
_RECOVERY = (
    "stability.max_consecutive_skips, stability.max_rollbacks and stability.rollback_lr_factor say "
    "what follows bad steps"
)
_MACHINES = (
    "several machines are started by torchrun (on each: torchrun --nnodes 2 --nproc-per-node 8 "
    "--rdzv-backend c10d --rdzv-endpoint node1:29500 -m runner distributed=ddp) or by SLURM "
    "(srun --nodes 2 --ntasks-per-node 8 python -m runner distributed=ddp)"
)
_SPLIT = "training.batch_size is all samples of an update, training.micro_batch those of one pass"
OWN_CLASSES = "data, model, objective and optimizer have it; others go into debug.hooks"
OWN_SCHEDULE = (
    "a scheduler of your own is called from Python: Components(optimizer=…, hooks=[…]), with a "
    "hook whose on_step calls its step()"
)
_CLAIMS = "claims about techniques are measured by python scripts/bench_claims.py in a checkout"
_HINTS = {
    "logger loggers wandb mlflow tensorboard report_to": _LOGGERS,
    "callbacks callback hooks": _HOOKS,
    "gpus devices num_gpus strategy ddp world_size": _DEVICE,
    "nodes num_nodes nnodes rendezvous rdzv_endpoint": _MACHINES,
    "recovery": _RECOVERY,
    "accumulate_grad_batches gradient_accumulation_steps": _SPLIT,
    "claims": _CLAIMS,
}
UNSUPPORTED = {name: hint for names, hint in _HINTS.items() for name in names.split()}
"""Names without a key here, and what to use instead."""


def find_options(group: str, text: str, options: Container[str]) -> str:
    """Replace each word of a value by the option that it names, in groups of OPTION_WORDS."""

    def replace(match: re.Match[str]) -> str:
        folded = match[0].casefold()
        option = OPTION_WORDS[group].get(folded, folded)
        return option if option in options and match[0] not in options else match[0]

    return _WORD.sub(replace, text) if group in OPTION_WORDS and "$" not in text else text


def find_key(name: str) -> str:
    """Return our key for another program's, or "" if there is none."""
    name = name.casefold().replace("-", "_")
    spellings = {name, re.sub("^(use|enable)_", "", name)}
    return next((key for key, names in KEY_ALIASES.items() if spellings & {*names.split()}), "")


def find_overrides(name: str, value: str, batch_size: int) -> list[str]:
    """Return overrides with the effect of another program's `name=value`; [] if none is known."""
    by_value = VALUE_ALIASES.get(name, {})
    value = value.strip("'\"")
    template = by_value.get(value.casefold(), by_value.get("*", ""))
    divisor = int(value) if value.isdecimal() else 0
    if "{micro_batch}" in template and (not divisor or batch_size % divisor):
        return []
    return template.format(value=value, micro_batch=batch_size // (divisor or 1)).split()


def find_replacement(key: str) -> str:
    """Return what to use instead of a name without a key here, or "" if unknown."""
    parts = key.casefold().replace("-", "_").split(".")
    return next((UNSUPPORTED[part] for part in parts if part in UNSUPPORTED), "")
