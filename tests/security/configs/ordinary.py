"""Configs as people write them; every one of these must pass."""

from __future__ import annotations

from .case import EXPERIMENT, Case, by_file, typed

TRUSTED = "security.trusted=[my_package]"
SWEPT = """
hydra:
  sweeper:
    params:
      optimizer.lr: 0.1,0.01
      seed: range(0,3)
"""
LOGGED = """
hydra:
  job_logging:
    version: 1
    formatters: {plain: {class: logging.Formatter, format: '%(message)s'}}
    handlers:
      console: {class: logging.StreamHandler, formatter: plain, stream: ext://sys.stdout}
      file: {class: logging.FileHandler, filename: '${hydra.runtime.output_dir}/own.log'}
    root: {handlers: [console, file], level: INFO}
    disable_existing_loggers: false
"""
COLOURED = """
hydra:
  job_logging:
    version: 1
    formatters:
      colours: {(): colorlog.ColoredFormatter, format: '%(message)s', log_colors: {DEBUG: purple}}
    filters: {ours: {name: runner}}
    handlers:
      console: {class: logging.StreamHandler, formatter: colours, filters: [ours]}
      file: {(): logging.handlers.RotatingFileHandler, filename: outputs/own.log, maxBytes: 1000}
    loggers: {mine: {level: DEBUG, propagate: false, handlers: [console]}}
    root: {handlers: [file]}
"""
FOLDED = """
hydra:
  job_logging:
    formatters:
      tabs: {format: "%(asctime)s\\t%(levelname)s\\t%(message)s", datefmt: '%d. %b %H:%M:%S'}
      block:
        format: >
          [%(asctime)s]
          %(message)s
"""
ORDINARY = [
    typed("nothing"),
    typed("keys", "training.steps=3", "optimizer.lr=0.01", "model.width=32", "seed=7"),
    typed("groups", "data=cancer", "optimizer=sgd", "schedule=constant", "optimization=none"),
    typed("an experiment of ours", "experiment=digits_cnn"),
    typed("every level", "optimization=ultra", "debug=full", "stability=strict"),
    typed("strict", "security=strict"),
    typed("strict, under the root", "security=strict", "hydra.run.dir=outputs/mine"),
    typed("a sweep", "-m", "optimization=none,basic", "seed=0,1"),
    typed("a sweep over a range", "-m", "seed=range(0,3)"),
    typed("a sweep over a glob", "-m", "optimizer=glob(*)"),
    typed("jobs at the same time", "-m", "seed=0,1", "hydra.launcher.jobs=2"),
    typed("Hydra's own launcher", "-m", "seed=0,1", "hydra/launcher=basic"),
    typed("a place of one's own", "hydra.run.dir=/tmp/mine"),
    typed("a place that is put together", "hydra.run.dir='/tmp/mine/${name}/${seed}'"),
    typed("a sweep's place", "-m", "seed=0,1", "hydra.sweep.dir=/tmp/s",
          "hydra.sweep.subdir='g/${hydra.job.num}'"),
    typed("more to read", "hydra.verbose=true", "hydra.job.chdir=false"),
    typed("Hydra's log", "hydra/job_logging=default", "hydra/hydra_logging=default"),
    typed("a class of torch", "model._target_=torch.nn.Linear", "+model.in_features=64",
          "+model.out_features=10"),
    typed("where it is defined", "model._target_=torch.nn.modules.linear.Linear"),
    typed("a class of one's own", "model._target_=my_package.Net", TRUSTED, "+model.width=8"),
    typed("classes within classes", "model._target_=my_package.Net", TRUSTED,
          "+model.head={_target_:torch.nn.ReLU}"),
    typed("a reference", "training.steps=20", "name='n${training.steps}'"),
    typed("a callback of Hydra's", "+hydra.callbacks.log._target_="
          "hydra.experimental.callbacks.LogJobReturnCallback"),
    typed("a benchmark", "job=benchmark", "benchmark.arms=[none,basic]"),
    typed("to be shown", "--cfg", "job"),
    typed("Hydra's to be shown", "--cfg", "hydra"),
    typed("no gate", "security=off", "model._target_=my_package.Net"),
    by_file("an experiment of one's own", "defaults: [{override /data: cancer}]\nseed: 3\n"
            "training: {steps: 20}\nname: own\n", ""),
    by_file("anchors", "optimizer: {options: {a: &a {x: 1}, b: *a, c: {<<: *a, y: 2}}}\n", ""),
    by_file("references", "training: {steps: 20}\nschedule: {warmup: 0}\n"
            "name: 'run-${training.steps}'\n", ""),
    by_file("one's own class", "model: {_target_: my_package.Net, arguments: {width: 8}}\n", "",
            TRUSTED),
    by_file("a raised level", "security: {level: strict}\n", ""),
    by_file("a lowered limit", "security: {limits: {hours: 2}}\n", ""),
    by_file("a place under the root", "hydra: {run: {dir: 'outputs/own/${name}'}}\n", ""),
    by_file("a sweep in a file", SWEPT, "", "-m"),
    by_file("a log in a file", LOGGED, ""),
    by_file("a log in colours", COLOURED, ""),
    by_file("a log with tabs, a format in a block", FOLDED, ""),
    *(typed(f"a log of Hydra's: {name}", f"hydra/job_logging={name}", f"hydra/hydra_logging={name}")
      for name in ("default", "disabled", "none")),
    typed("Hydra's log in a file", "hydra/job_logging=stdout"),
    typed("what to go on with, by reference", "job=scan", "+optimizer.options.here=.",
          "scan.path='${optimizer.options.here}'"),
    by_file("how jobs run", "hydra: {launcher: {jobs: 2, retries: 1}}\n", "", "-m", "seed=0,1"),
    by_file("arms", "defaults: [{override /job: benchmark}]\n"
            "benchmark: {arms: [none, basic]}\n", ""),
    Case("a group of one's own", ["--config-dir=mine", "optimizer=fast"],
         {"mine/optimizer/fast.yaml": "# fast\nlr: 0.5\nname: SGD\n"}),
    Case("a search path", ["hydra.searchpath=[file://mine]", "experiment=own"],
         {"mine/experiment/own.yaml": EXPERIMENT + "seed: 5\n"}),
    Case("a config path", ["--config-path=mine"],
         {"mine/config.yaml": "defaults: [/schema@_here_: run, {/schema/data@data: digits}, "
          "{/schema/model@model: mlp}, _self_]\nseed: 9\n"}),
]  # fmt: skip
