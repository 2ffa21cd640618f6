"""What other programs call our keys and options; a suggestion made of them is composed first."""

from __future__ import annotations

KEYS = {
    "training.epochs": "epochs max_epochs num_epochs n_epochs num_train_epochs nb_epochs epoch",
    "training.steps": "steps max_steps num_steps n_steps iterations iters max_iters num_iters",
    "training.batch_size": "batch_size bs batch train_batch_size per_device_train_batch_size",
    "training.micro_batch": "micro_batch micro_batch_size",
    "training.validate_every": "val_check_interval eval_every eval_steps eval_interval val_every "
    "val_interval check_val_every eval_freq",
    "training.patience": "patience early_stopping early_stopping_patience early_stop",
    "training.monitor": "monitor metric metric_for_best_model",
    "optimizer.lr": "lr learning_rate base_lr max_lr",
    "optimizer.weight_decay": "weight_decay wd decay l2",
    "optimizer.ema": "ema ema_decay",
    "+optimizer.options.betas": "betas",
    "optimizer=sgd optimizer.options.momentum": "momentum",
    "+optimizer.options.eps": "eps adam_epsilon",
    "optimizer=sgd optimizer.options.nesterov": "nesterov",
    "+optimizer.options.amsgrad": "amsgrad",
    "schedule.warmup": "warmup warmup_steps num_warmup_steps warmup_ratio warmup_updates",
    "schedule.gamma": "gamma lr_gamma",
    "optimizer": "optim optimiser opt",
    "schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type sched",
    "data": "dataset datamodule dm dataset_name",
    "data.path": "data_path data_dir dataset_path root train_file path file csv",
    "data.target": "target label label_column target_column",
    "data.workers": "num_workers workers n_workers dataloader_num_workers num_proc",
    "data.pin_memory": "pin_memory dataloader_pin_memory",
    "data.shuffle": "shuffle",
    "data.validation": "val_split valid_split validation_split test_size val_size",
    "model": "net network arch architecture backbone model_name model_type",
    "model.width": "width hidden hidden_size hidden_dim hidden_units dim d_model n_embd embed_dim",
    "model.depth": "depth num_layers n_layers n_layer layers num_hidden_layers",
    "model.heads": "heads num_heads n_heads n_head nhead num_attention_heads",
    "model.dropout": "dropout dropout_rate p_dropout",
    "model.weights": "weights init_from load_from pretrained_path model_name_or_path",
    "data.sequence": "sequence seq_len sequence_length block_size context_length max_length",
    "objective": "loss criterion loss_fn loss_function",
    "seed": "seed_everything random_seed manual_seed random_state rng_seed",
    "device": "accelerator",
    "device.threads": "threads num_threads torch_threads",
    "device.deterministic": "deterministic use_deterministic_algorithms",
    "device.cudnn_benchmark": "cudnn_benchmark",
    "device.index": "device_id gpu_id local_rank",
    "stability.clip_norm": "clip_norm grad_clip clip_grad clip_grad_norm gradient_clip_val "
    "max_grad_norm grad_norm_clip gradient_clip gradient_clipping clip",
    "optimization": "optimization_level opt_level",
    "optimization.compile.enabled": "compile torch_compile compile_model",
    "optimization.recompute.enabled": "gradient_checkpointing activation_checkpointing",
    "optimization.tf32.enabled": "tf32 allow_tf32",
    "checkpoint.resume": "resume ckpt_path resume_from resume_from_checkpoint checkpoint_path "
    "load_checkpoint ckpt",
    "checkpoint.every": "save_every save_steps ckpt_every checkpoint_every save_interval "
    "every_n_train_steps",
    "checkpoint.keep": "save_top_k save_total_limit",
    "monitoring.every": "log_every log_every_n_steps logging_steps log_interval log_steps",
    "monitoring.log_level": "log_level loglevel",
    "hydra.run.dir": "output_dir out_dir save_dir log_dir logdir default_root_dir work_dir outdir",
    "name": "run_name exp_name experiment_name",
    "job": "task cmd action",
    "debug": "debug_mode",
}
"""Our keys, and the names of other programs whose value ours takes, whatever group they are in."""

_BF16 = "optimization.amp.enabled=true optimization.amp.dtype=bf16"
_FP16 = "optimization.amp.enabled=true optimization.amp.dtype=fp16"
_FP32 = "optimization.amp.enabled=false"
_SWITCH = {"true": "optimization.amp.enabled=true", "false": _FP32}
_PRECISION = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "torch.bfloat16"), _BF16),
    **dict.fromkeys(("16", "fp16", "float16", "16-mixed", "fp16-mixed", "half"), _FP16),
    **dict.fromkeys(("32", "fp32", "float32", "32-true", "full", "no"), _FP32),
}
_DEVICES = {"0": "device=cpu", "1": "device=cuda", "-1": "device=auto", "auto": "device=auto"}
_DEBUG = {"true": "debug=full", "false": "debug=none"}
VALUES = {
    **dict.fromkeys(("precision", "dtype", "mixed_precision", "amp_dtype"), _SWITCH | _PRECISION),
    **dict.fromkeys(("amp", "use_amp", "autocast", "amp_enabled"), _SWITCH | _PRECISION),
    **dict.fromkeys(("fp16", "half"), {"true": _FP16, "false": _FP32}),
    **dict.fromkeys(("bf16", "bfloat16"), {"true": _BF16, "false": _FP32}),
    **dict.fromkeys(("gpus", "devices", "num_gpus", "n_gpu", "gpu"), _DEVICES),
    **dict.fromkeys(("cuda", "use_cuda"), {"true": "device=cuda", "false": "device=cpu"}),
    **dict.fromkeys(("cpu", "no_cuda", "use_cpu"), {"true": "device=cpu"}),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), {
        "true": "checkpoint.resume=auto", "false": "checkpoint.resume=none",
        "last": "checkpoint.resume=auto",
    }),
    **dict.fromkeys(("fast_dev_run", "dry_run", "smoke_test"), {"true": "training.steps=1"}),
    **dict.fromkeys(("verbose",), {"true": "monitoring.log_level=debug"}),
    **dict.fromkeys(("quiet",), {"true": "monitoring=quiet"}),
    **dict.fromkeys(("eval", "evaluate", "do_eval", "eval_only", "test_only", "test"),
                    {"true": "job=evaluate"}),
    **dict.fromkeys(("mode", "task", "action", "cmd", "stage"), {
        "eval": "job=evaluate", "evaluate": "job=evaluate", "test": "job=evaluate",
        "train": "job=train", "fit": "job=train", "benchmark": "job=benchmark",
    }),
    **dict.fromkeys(("detect_anomaly", "anomaly"), {"true": "debug=anomaly"}),
    **dict.fromkeys(("profile", "profiler"), {"true": "debug=profile", "simple": "debug=profile",
                                              "pytorch": "debug=profile"}),
}  # fmt: skip
"""Names of other programs by their value, and what it is here."""

OPTIONS = {
    "device": {"gpu": "device=cuda", "nvidia": "device=cuda", "metal": "device=mps"},
    "debug": _DEBUG | {"on": "debug=full", "off": "debug=none", "all": "debug=full",
                       "nan": "debug=anomaly", "null": "debug=none"},
    "data": {"mnist": "data=digits", "breast_cancer": "data=cancer", "csv": "data=tabular",
             "table": "data=tabular", "parquet": "data=tabular", "npz": "data=arrays",
             "imagefolder": "data=images", "folder": "data=images"},
    "model": {**dict.fromkeys(("transformer", "gpt2", "nanogpt", "lm"),
                              "model=gpt | data=stdlib_text model=gpt"),
              "resnet": "model=cnn", "conv": "model=cnn", "fc": "model=mlp",
              "linear": "model=mlp model.depth=0"},
    "objective": {**dict.fromkeys(("cross_entropy", "crossentropy", "ce", "nll", "bce"),
                                  "objective=classification"),
                  **dict.fromkeys(("mse", "l2", "mean_squared_error"), "objective=regression"),
                  "lm": "objective=language_modelling"},
    "schedule": {"none": "schedule=constant", "null": "schedule=constant",
                 "cosine_annealing": "schedule=cosine", "cosineannealinglr": "schedule=cosine",
                 "steplr": "schedule=step", "onecyclelr": "schedule=onecycle"},
    "job": {"fit": "job=train", "training": "job=train", "test": "job=evaluate",
            "validate": "job=evaluate", "bench": "job=benchmark", "check": "job=doctor"},
    "optimization": {"o0": "optimization=none", "o1": "optimization=basic", "off":
                     "optimization=none", "null": "optimization=none", "max":
                     "optimization=maximum", "best": "optimization=auto",
                     "bf16": "optimization=amp optimization.amp.dtype=bf16",
                     "fp16": "optimization=amp optimization.amp.dtype=fp16"},
    "stability": {"on": "stability=default", "none": "stability=off"},
    "security": {"none": "security=off", "on": "security=standard"},
    "checkpoint": {"none": "checkpoint=off", "true": "checkpoint=default",
                   "false": "checkpoint=off", "on": "checkpoint=default"},
    "training": {"fast": "training=short", "quick": "training=short"},
}  # fmt: skip
"""By group, options of other programs and what they are here; ` | ` is between second guesses."""

GROUPS = {"trainer": "training", "train": "training", "dataloader": "data", "devices": "device",
          "hardware": "device", "logging": "monitoring", "monitor": "training"}  # fmt: skip
"""Names of other programs for our groups, where keys follow."""

NAMES_OF_OPTIONS = ("name", "type", "kind", "class", "arch", "id", "dataset", "model")
"""`model.name=cnn` is `model=cnn` here."""

NOT_THERE = {
    **dict.fromkeys(
        ("logger", "loggers", "wandb", "mlflow", "tensorboard", "report_to", "comet", "neptune"),
        "a run always writes metrics.jsonl, summary.json and TensorBoard; monitoring.* sets how",
    ),
    **dict.fromkeys(
        ("callbacks", "callback", "hooks"),
        "stopping early is training.patience, checkpoints are checkpoint.*; a class of your own "
        "goes into debug.hooks=[package.Class]",
    ),
    **dict.fromkeys(
        ("gpus", "devices", "num_gpus", "n_gpu", "strategy", "distributed", "num_nodes", "nodes",
         "world_size", "nproc_per_node", "ddp", "fsdp"),
        "a run takes one device: device=cuda device.index=0; -m with hydra.launcher.jobs runs "
        "several side by side",
    ),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum_steps",
         "accumulation_steps", "grad_accum"),
        "training.batch_size is all samples of an update, and training.micro_batch how many of "
        "them a backward pass takes",
    ),
}  # fmt: skip
"""What has no key of its own here, and what there is in its place."""

TORCHVISION = (
    "alexnet convnext densenet efficientnet googlenet inception maxvit mnasnet mobilenet regnet "
    "resnet resnext shufflenet squeezenet swin vgg vit wide_resnet"
).split()
"""How names of torchvision's models begin."""

FILES = {".csv": "tabular", ".tsv": "tabular", ".parquet": "tabular", ".npz": "arrays",
         ".bin": "tokens"}  # fmt: skip
"""Which option reads a file, by how its name ends."""

PLUGINS = {
    **dict.fromkeys(("submitit_slurm", "submitit_local"), ("hydra-submitit-launcher", "")),
    "joblib": ("hydra-joblib-launcher", ""),
    "ray": ("hydra-ray-launcher", ""),
    "ray_aws": ("hydra-ray-launcher", ""),
    "rq": ("hydra-rq-launcher", ""),
    "optuna": ("hydra-optuna-sweeper", "its newest release needs optuna<3"),
    "ax": ("hydra-ax-sweeper", ""),
    "nevergrad": ("hydra-nevergrad-sweeper", ""),
    "colorlog": ("hydra-colorlog", "the runner sets its own logging up, so nothing comes of it"),
}
"""Plugins of Hydra: the package that has each, and what to know of it."""


def key_of(name: str) -> str:
    """Our key of a foreign one, whatever group that is in; "" where there is none."""
    return next((ours for ours, names in KEYS.items() if name in names.split()), "")
