"""Configs that would be one thing when they are checked and another one when they are used."""

from __future__ import annotations

from .case import EXPERIMENT, Case, by_file, typed

ASKED = "${hydra.job_logging.t.${oc.select:hydra.job.id,evil}}"  # until the job has a number
CHANGING = [
    by_file("a log's factory", "hydra: {job_logging: {version: 1, t: {'0': logging.NullHandler, "
            f"evil: os.mkdir}}, handlers: {{x: {{'()': '{ASKED}', path: ran}}}}, "
            "root: {handlers: [x]}}}\n", "write the name itself"),
    by_file("a callback", "hydra: {job_logging: {t: {evil: os.mkdir}}, callbacks: {x: "
            f"{{_target_: '{ASKED}', path: ran}}}}}}\n", "hydra.callbacks.x._target_"),
    by_file("callbacks elsewhere", "optimizer: {options: {c: {x: {}}}}\n"
            "hydra: {callbacks: '${optimizer.options.c}'}\n", "hydra.callbacks"),
    by_file("one of them elsewhere", "optimizer: {options: {c: {name: x}}}\n"
            "hydra: {callbacks: {x: '${optimizer.options.c}'}}\n", "a whole group of settings"),
    by_file("a callback beside one that leads nowhere", "hydra: {callbacks: {a: {b: '${nowhere}'}, "
            "x: {_target_: os.mkdir, path: ran}}}\n", "os.mkdir"),
    by_file("a log's stream", "hydra: {job_logging: {version: 1, handlers: {x: {class: "
            "logging.StreamHandler, stream: '${oc.select:hydra.job.id,ext}://evil_pkg.x'}}}}\n",
            "can change after it was checked"),
    by_file("a folder", "hydra: {job_logging: {t: {evil: ../ran}}, "
            f"run: {{dir: '{ASKED}'}}}}\n", "hydra.run.dir"),
    by_file("a folder, at second hand", f"hydra: {{job_logging: {{t: {{evil: ../ran}}}}}}\n"
            f"optimizer: {{options: {{a: '{ASKED}'}}}}\nnotes: x\n"
            "name: '${optimizer.options.a}'\n", "", mistake=True),
    by_file("a name, at second hand", f"optimizer: {{options: {{a: '{ASKED}'}}}}\n"
            "name: '${optimizer.options.a}'\n", "optimizer.options.a"),
    by_file("a sibling by dots", f"optimizer: {{options: {{a.b: '${{.c}}', c: '{ASKED}'}}}}\n"
            "name: '${optimizer.options}'\n", "optimizer.options"),
    by_file("a folder of a job", "hydra: {job_logging: {t: {n0: '0', n1: ../../../../ran}}, sweep: "
            "{subdir: '${oc.select:hydra.job_logging.t.n${hydra.job.num}}'}}\n",
            "hydra.sweep.subdir", "-m", "seed=0,1"),
    by_file("a log among a product of values", "hydra: {job_logging: {version: 1, handlers: {x: {"
            "class: logging.FileHandler, "
            "filename: '${oc.select:hydra.job_logging.t.n${seed},outputs/a}'}}}}\n",
            "hydra.job_logging.handlers.x.filename", "-m", "seed=0,1"),
    by_file("a log that leads up", "hydra: {job_logging: {version: 1, handlers: {x: {class: "
            "logging.FileHandler, filename: '${hydra.runtime.output_dir}/../../x'}}}}\n",
            "it leads up"),
    *(
        by_file(f"what {key} names", "hydra: {help: {app_name: none}}\n" + key.replace(".", ": {")
                + ": '${oc.select:hydra.help.app_name,/elsewhere}'}\n",
                f"{key}: ${{oc.select:hydra.help.app_name,/elsewhere}} is refused", *more)
        for key, *more in (
            ("checkpoint.resume",), ("replay.path", "job=replay"), ("scan.path", "job=scan"),
            ("sweep.resume", "-m", "seed=0,1"), ("benchmark.baseline", "job=benchmark"),
        )
    ),
    by_file("what is gone on with, at second hand", "hydra: {help: {app_name: none}}\n"
            "notes: '${oc.select:hydra.help.app_name,/elsewhere}'\n"
            "checkpoint: {resume: '${notes}'}\n", "", mistake=True),
    by_file("a number of a job", "hydra: {job: {id: evil}}\n", "hydra.job.id"),
    by_file("a folder that Hydra names", "hydra: {runtime: {output_dir: ../ran}}\n",
            "hydra.runtime.output_dir"),
    by_file("a level", "hydra: {job_logging: {lv: standard}}\n"
            "security: {level: \"${oc.select:hydra.job_logging.lv,'off'}\"}\n", "security.level"),
    by_file("a level, by group", "optimizer: {options: {s: {level: 'off'}}}\n"
            "security: ${optimizer.options.s}\n", "an option is named in the defaults",
            mistake=True),
    by_file("a class", "hydra: {job_logging: {tg: torch.nn.Linear}}\n"
            "model: {_target_: '${oc.select:hydra.job_logging.tg,os.makedirs}'}\n",
            "model._target_"),
]  # fmt: skip
OUTSIDE = [
    Case("strict: an option up the tree", ["experiment=../../theirs/x", "security=strict"],
         {"theirs/x.yaml": EXPERIMENT + "seed: 3\n"}, "below its folder"),
    typed("an option of Hydra's up the tree", "hydra/job_logging=../../../../theirs/x",
          says="below its folder"),
    typed("a config by its path", "--config-name=../theirs/x", says="below its folder"),
    typed("a config from the root", "--config-name=/theirs/x", says="below its folder"),
    by_file("an option up the tree, in a file", "defaults: [../../mine/x]\n", "below its folder"),
    Case("an option that a resumed run had", ["checkpoint.resume=theirs/gift"],
         {"theirs/gift/.hydra/overrides.yaml": "- experiment=../../theirs/gift/x\n",
          "theirs/gift/checkpoints/x": "", "theirs/gift/x.yaml": EXPERIMENT}, "below its folder"),
    Case("two search paths", ["hydra.searchpath=[file://theirs]", "hydra.searchpath=[]"],
         {"theirs/experiment/own.yaml": EXPERIMENT}, "comes twice"),
    typed("two search paths, of a package", "hydra.searchpath=[pkg://evil_pkg]",
          "hydra.searchpath=[]", says="comes twice"),
    Case("a key by alias", ["--config-path=theirs"],
         {"theirs/config.yaml": "name: &k searchpath\nhydra: {*k : ['pkg://evil_pkg']}\n"},
         "*k is refused"),
]  # fmt: skip
ARMS = [
    by_file("an arm that says it in quotes", "benchmark: {arms: [none, 'x: \"secu\"rity.trusted="
            "[evil_pkg] model._target_=evil_pkg.Payload']}\n", "benchmark.arms", "job=benchmark"),
    by_file("an arm that stands for another value",
            "notes: x\nbenchmark: {arms: [none, '${notes}']}\n", "", "job=benchmark",
            mistake=True),
    Case("an arm of theirs", ["--config-dir=theirs", "experiment=own", "job=benchmark"],
         {"theirs/experiment/own.yaml": EXPERIMENT + "benchmark: {arms: [none, experiment=arm]}\n",
          "theirs/experiment/arm.yaml": EXPERIMENT + "security: {trusted: [evil_pkg]}\n"
          "model: {_target_: '${oc.select:nix.nix,evil_pkg.Payload}'}\n"}, "security.trusted"),
    typed("a typed arm that trusts", "job=benchmark",
          "benchmark.arms=[none,'basic security.trusted=[evil_pkg]']",
          says="about the benchmark", mistake=True),
]  # fmt: skip
