"""Configs that ask for what they may not; each payload could at most touch a file called `ran`."""

from __future__ import annotations

from .case import EXPERIMENT, Case, by_file, typed
from .changing import ARMS, CHANGING, OUTSIDE

CALLED = (  # what Hydra 1.3.8 calls without a word, and more of the kind
    "os.system", "os.mkdir", "builtins.open", "builtins.eval", "shutil.copyfile", "venv.create",
    "subprocess.Popen", "torch.hub.load", "torch.load", "torch.utils.collect_env.run",
    "setuptools._distutils.spawn.spawn", "multiprocessing.util.spawnv_passfds",
    "uuid._get_command_stdout", "torch.os.mkdir", "runner.cli.launch.os.mkdir",
    "runner.storage.replace_text", "evil_pkg.Payload", "functools.partial", "pickle.loads",
    "importlib.import_module", "hydra.utils.instantiate", "hydra.utils.get_method",
    "torch.nn.functional.torch.load", "torch.nn.init.math.sqrt",
    "torch.utils.data.datapipes.iter.FileOpener", "torch.nn.Module.load_state_dict",
    "torch.nn.Linear.__init__", "hydra._internal.utils._locate",
    "code.interact", "pty.spawn", "ctypes.CDLL", "runpy.run_path", "pip.main", "timeit.timeit",
)  # fmt: skip
PLACES = {  # where a config can name something to be called
    "in a list of arguments": "model:\n  _target_: torch.nn.Linear\n  arguments:\n"
    "    parts: [1, {a: {_target_: evil_pkg.Payload}}]\n",
    "as a partial": "model:\n  _target_: torch.nn.Linear\n  arguments:\n"
    "    f: {_target_: evil_pkg.Payload, _partial_: true}\n",
    "not recursive": "data:\n  _target_: torch.utils.data.TensorDataset\n  arguments:\n"
    "    f: {_recursive_: false, _target_: evil_pkg.Payload}\n",
    "as a hook": "debug:\n  hooks: [evil_pkg.Payload]\n",
    "within a hook": "debug:\n  hooks: [{_target_: evil_pkg.Payload}]\n",
    "as a technique": "optimization:\n  extra: [evil_pkg.Payload]\n",
    "as an objective": "objective:\n  _target_: evil_pkg.Payload\n",
    "by reference": "optimizer:\n  options: {evil: evil_pkg.Payload}\n"
    "model:\n  _target_: ${optimizer.options.evil}\n",
    "by alias": "optimizer:\n  options: {a: &it evil_pkg.Payload}\nmodel:\n  _target_: *it\n",
    "among options": "optimizer:\n  options: {a: {_target_: evil_pkg.Payload}}\n",
    "as a callback": "hydra:\n  callbacks:\n    own: {_target_: evil_pkg.Payload}\n",
    "as a launcher": "hydra:\n  launcher:\n    _target_: evil_pkg.Payload\n",
    "as a plugin of Hydra": "hydra:\n  launcher:\n    _target_: hydra_plugins.evil.Payload\n",
    "as a sweeper": "hydra:\n  sweeper:\n    _target_: evil_pkg.Payload\n",
}
LOGS = {
    "a factory": "formatters: {f: {(): evil_pkg.Payload}}",
    "a handler": "handlers: {h: {class: evil_pkg.Payload}}",
    "a filter": "filters: {f: {(): os.mkdir, name: ran}}",
    "a socket": "handlers: {h: {class: logging.handlers.SocketHandler, host: h, port: 1}}",
    "mail": "handlers: {h: {class: logging.handlers.SMTPHandler}}",
    "any object": "handlers: {h: {class: logging.StreamHandler, stream: 'ext://os.environ'}}",
    "a formatter's class": "formatters: {f: {class: evil_pkg.Payload}}",
    "an attribute": "handlers: {h: {class: logging.NullHandler, .: {x: 1}}}",
    "a checkpoint for a log": "handlers: {h: {class: logging.FileHandler, filename: outputs/a.pt}}",
    "codes for the terminal": 'formatters: {f: {format: "\\e]0;owned\\a%(message)s"}}',
    "a line that is forged": 'formatters: {f: {format: "%(message)s\\nerror: none"}}',
    "a number that becomes a code": 'formatters: {f: {format: "%(levelno)c %(message)s"}}',
    "a date of two lines": 'formatters: {f: {format: "%(asctime)s", datefmt: "%n21:00 error: no"}}',
    "letters that become codes": "handlers: {h: {class: logging.FileHandler, "
    "filename: outputs/a.log, encoding: utf-16}}",
    "a file outside": "handlers: {h: {class: logging.FileHandler, filename: ../ran}}",
    "a handler for a formatter": "formatters: {f: {class: logging.FileHandler, format: ../ran, "
    "datefmt: w, style: utf-8}}",
    "a handler for a formatter, as a factory": "formatters: {f: {(): logging.FileHandler, "
    "filename: outputs/ran}}",
    "a handler for a filter": "filters: {f: {(): logging.FileHandler, filename: outputs/ran}}",
    "a formatter for a handler": "handlers: {h: {class: logging.Formatter}}",
    "a filter for a formatter": "formatters: {f: {class: logging.Filter, format: x}}",
    "a formatter's file": "formatters: {f: {class: logging.Formatter, filename: outputs/ran}}",
    "a handler's target": "handlers: {h: {class: logging.StreamHandler, target: x}}",
    "a console for a handler": "handlers: {h: {class: rich.logging.RichHandler, "
    "console: {(): logging.FileHandler}}}",
    "something within a colour": "formatters: {f: {(): colorlog.ColoredFormatter, "
    "log_colors: {(): os.mkdir}}}",
    "a logger's class": "loggers: {runner: {class: logging.FileHandler}}",
    "a root that makes": "root: {handlers: [{(): os.mkdir}]}",
    "a section that there is not": "queues: {f: {class: logging.FileHandler}}",
    "formatters in a list": "formatters: [{class: logging.FileHandler, format: outputs/ran}]",
}
LAUGHS = "".join(
    f"  a{i}: {{ {', '.join(f'k{j}: *a{i - 1}' for j in range(10))} }}\n".replace(
        ":", f": &a{i}", 1
    )
    for i in range(1, 9)
)
GROWING = "".join(
    f"    a{i}: '" + f"${{optimizer.options.a{i - 1}}}" * 12 + "'\n" for i in range(1, 9)
)
TREES = "".join(
    f"    b{i}:\n" + f"      - ${{optimizer.options.b{i - 1}}}\n" * 12 for i in range(1, 9)
)
BIG = "x" * 70_000

CALLABLES = [
    *(typed(f"typed: {name}", f"model._target_={name}", says="model._target_") for name in CALLED),
    *(by_file(f"{where}", body, "evil") for where, body in PLACES.items()),
    *(
        by_file(f"log: {what}", f"hydra:\n  job_logging:\n    version: 1\n    {body}\n", "refused")
        for what, body in LOGS.items()
    ),
    by_file("Hydra's own log", "hydra:\n  hydra_logging: {formatters: {f: {(): os.mkdir}}}\n",
            "hydra.hydra_logging.formatters.f"),
    by_file("a letter that looks alike", "model: {_target_: torch.nn.L\u0456near}\n",
            "not a plain dotted name"),
    by_file("a sweeper's space", "hydra:\n  sweeper: {custom_search_space: evil_pkg.Payload}\n",
            "custom_search_space", mistake=True),
    typed("typed callback", "+hydra.callbacks.x._target_=evil_pkg.Payload", says="evil_pkg"),
    typed("typed launcher", "hydra.launcher._target_=evil_pkg.Payload", says="evil_pkg"),
    typed("a whole node", "model={_target_:os.mkdir}", says="os.mkdir"),
    typed("an argument", "model._target_=torch.nn.Linear", "+model.x={_target_:os.mkdir}",
          says="os.mkdir"),
    typed("in a sweep", "-m", "model._target_=torch.nn.Linear,os.mkdir", says="os.mkdir"),
    typed("from text", "model._target_=torch.nn.Linear",
          "+model.x='${oc.create:{_target_:os.mkdir}}'", says="os.mkdir"),
    typed("a name of torch that is none", "model._target_=torch.nn.Linaer",
          says="did you mean torch.nn.Linear"),
    Case("a group of theirs", ["--config-dir=theirs", "+hydra/callbacks=x"],
         {"theirs/hydra/callbacks/x.yaml": "x: {_target_: evil_pkg.Payload}\n"}, "evil_pkg"),
]  # fmt: skip

LEVELS = [
    by_file("lowers the level", "security: {level: 'off'}\n", "security.level"),
    by_file("lowers it by a group", "defaults: [{override /security: 'off'}]\n", "security.level"),
    by_file("lowers what was typed", "defaults: [{override /security: standard}]\n",
            "strict", "security=strict"),
    by_file("trusts a package", "security: {trusted: [evil_pkg]}\nmodel: {_target_: evil_pkg.X}\n",
            "evil_pkg"),
    by_file("trusts beside what is typed", "security: {trusted: [evil_pkg]}\n",
            "security.trusted", "+security.pinned=[]"),
    by_file("trusts by reference", "optimizer: {options: {a: evil_pkg}}\n"
            "security: {trusted: ['${optimizer.options.a}']}\n", "security.trusted"),
    by_file("allows a pickle", f"security: {{allow_pickle: [{'a' * 64}]}}\n",
            "security.allow_pickle"),
    by_file("pins a file", f"security: {{pinned: [{'a' * 64}]}}\n", "security.pinned"),
    by_file("reads the environment", "security: {environment: [HOME]}\n", "security.environment"),
    Case("an option of theirs", ["--config-dir=theirs", "security=mine"],
         {"theirs/security/mine.yaml": "trusted: [evil_pkg]\n"}, "security.trusted"),
    Case("a group placed elsewhere", ["--config-dir=theirs", "+odd@_global_=mine"],
         {"theirs/odd/mine.yaml": "security: {trusted: [evil_pkg]}\n"}, "security.trusted"),
    Case("a package in the header", ["--config-dir=theirs", "+odd=mine"],
         {"theirs/odd/mine.yaml": "# @package security\ntrusted: [evil_pkg]\n"},
         "security.trusted"),
    by_file("types for you", "hydra: {sweeper: {params: {security.trusted: '[evil_pkg]'}}}\n",
            "cannot type for you", "-m", "seed=1,2"),
    by_file("types for you, beside what is typed",
            "hydra: {sweeper: {params: {security.trusted: '[evil_pkg]'}}}\n",
            "cannot type for you", "-m", "+hydra.sweeper.params.seed='1,2'"),
    by_file("types for you, hidden", "hydra: {sweeper: {params: {seed=1: '2',"
            " 'security.level=off,off#': x}}}\n", "", "-m", "seed=1,2", mistake=True),
    by_file("an arm types for you", "benchmark: {arms: [none, 'basic security.level=off']}\n",
            "benchmark.arms"),
    typed("everything", "security.trusted=['*']", says="security=off"),
    typed("the standard library", "security.trusted=[os]", "model._target_=os.mkdir", says="os"),
    typed("torch", "security.trusted=[torch.hub]", "model._target_=torch.hub.load", says="torch"),
    typed("ours", "security.trusted=[runner]", "model._target_=runner.storage.replace_text",
          says="runner"),
    typed("a level by reference", "security.level=${name}", says="type it out"),
    typed("a level swept over", "-m", "security=off,standard", says="not swept over"),
    Case("strict: a folder", ["--config-dir=theirs", "security=strict"],
         {"theirs/experiment/own.yaml": "seed: 1\n"}, "security=strict"),
    Case("strict: a path", ["--config-path=theirs", "security=strict"],
         {"theirs/config.yaml": "seed: 1\n"}, "security=strict"),
    Case("strict: a search path", ["hydra.searchpath=[file://theirs]", "security=strict"],
         {"theirs/experiment/own.yaml": "seed: 1\n"}, "security=strict"),
    typed("strict: a place elsewhere", "hydra.run.dir=/elsewhere/run", "security=strict",
          says="hydra.run.dir"),
]  # fmt: skip

HYDRAS = [
    typed("rerun", "--experimental-rerun=x.pickle", says="unpickles"),
    typed("rerun, off", "--experimental-rerun=x.pickle", "security=off", says="unpickles"),
    typed("rerun in the middle", "seed=1", "--experimental-rerun", "x", says="unpickles"),
    typed("a package for a path", "--config-path=pkg://evil_pkg", says="import a package"),
    typed("a package to search", "hydra.searchpath=[pkg://evil_pkg]", says="import a package"),
    typed("a variable", "+hydra.job.env_set.LD_PRELOAD=x.so", says="env_set"),
    typed("a path for modules", "+hydra.job.env_set.PYTHONPATH=.", says="env_set"),
    typed("torch's guard", "++hydra.job.env_set.TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1",
          says="env_set"),
    typed("Hydra's guard", "+hydra.job.env_set={HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE: os.mkdir}",
          says="env_set"),
    typed("a variable copied", "hydra.job.env_copy=[HOME]", says="env_copy"),
    typed("the whole of Hydra", "hydra={job: {env_set: {A: b}}}", says="one by one"),
    typed("a folder of the run's", "hydra.runtime.output_dir=/", says="hydra.runtime"),
    typed("what it was told", "hydra.overrides.task=[a]", says="hydra.overrides"),
    typed("a group that there is not", "+hydra/evil=x", says="hydra/evil"),
    typed("a group in Hydra's place", "+data@hydra=digits", says="hydra"),
    by_file("a variable in a file", "hydra: {job: {env_set: {PATH: .}}}\n", "env_set"),
    by_file("a copied one in a file", "hydra: {job: {env_copy: [HOME]}}\n", "env_copy"),
    by_file("a script for the cluster", "hydra: {launcher: {setup: ['touch ran']}}\n",
            "hydra.launcher.setup", mistake=True),
    Case("a search path of theirs", ["--config-path=theirs"],
         {"theirs/config.yaml": "hydra: {searchpath: ['pkg://evil_pkg']}\n"}, "searchpath"),
    Case("one by reference", ["--config-path=theirs", "--config-name=main"],
         {"theirs/main.yaml": "x: {searchpath: ['pkg://evil_pkg']}\nhydra: ${x}\n"},
         "searchpath"),
    Case("Hydra by reference", ["--config-path=theirs"],
         {"theirs/config.yaml": "hydra: ${oc.create:'{searchpath: [pkg://evil_pkg]}'}\n"},
         "stands for another value"),
    Case("a config path of theirs", ["--config-path=theirs"],
         {"theirs/config.yaml": "hydra: {callbacks: {x: {_target_: evil_pkg.Payload}}}\n"},
         "evil_pkg"),
    by_file("a sweep that nobody typed", "hydra: {mode: MULTIRUN}\n", "hydra.mode", mistake=True),
    by_file("a sweep of sweeps", "hydra: {mode: MULTIRUN}\n", "hydra.mode", "-m", "seed=0,1",
            mistake=True),
    *(
        Case(" ".join(["in place of", name, *words]), ["--config-dir=theirs", *words],
             {f"theirs/{name}.yaml": "x: 1\n"}, f"would stand in for {name}")
        for name, *words in (
            ("schema/run",), ("schema/data/digits",), ("schema/model/mlp",),
            ("schema/data/mine", "+schema/data@data=mine"), ("hydra/launcher/isolated",),
            ("hydra/launcher/isolated", "-m", "seed=0,1"), ("hydra/config",),
            ("hydra/launcher/basic", "hydra/launcher=basic"), ("hydra/sweeper/basic",),
        )
    ),
    Case("a config path, as a variable", ["--config-path=theirs"],
         {"theirs/config.yaml": "hydra: {job: {env_set: {A: b}}}\n"}, "env_set"),
]  # fmt: skip

PLACED = [
    by_file("a run elsewhere", "hydra: {run: {dir: ../ran}}\n", "hydra.run.dir"),
    by_file("a run in the root", "hydra: {run: {dir: /ran}}\n", "hydra.run.dir"),
    by_file("a run up the tree", "hydra: {run: {dir: 'outputs/a/../../../ran'}}\n",
            "hydra.run.dir"),
    by_file("a run through a link", "hydra: {run: {dir: outputs/link/ran}}\n", "hydra.run.dir"),
    by_file("a run by reference", "notes: ../ran\nhydra: {run: {dir: '${notes}'}}\n", "",
            mistake=True),
    by_file("a sweep elsewhere", "hydra: {sweep: {dir: ../ran}}\n", "hydra.sweep.dir"),
    by_file("a job elsewhere", "hydra: {sweep: {subdir: ../../../../ran}}\n", "hydra.sweep.subdir"),
    by_file("a record elsewhere", "hydra: {output_subdir: ../../../../../ran}\n",
            "hydra.output_subdir"),
    by_file("a log elsewhere", "hydra: {job: {name: ../../ran}}\n", "hydra.job.name"),
    by_file("a record of a job elsewhere", "hydra: {run: {dir: outputs/a/b/c/d/e/f/g}, "
            "sweep: {dir: outputs/s, subdir: '${hydra.job.num}'}, output_subdir: ../../../ran}\n",
            "hydra.output_subdir", "-m", "seed=0,1", "hydra/launcher=basic"),
    by_file("a job's folder up the tree", "hydra: {sweep: {dir: outputs/s, subdir: ../../ran}}\n",
            "hydra.sweep.subdir", "-m", "seed=0,1", "hydra/launcher=basic"),
    by_file("a name that is a path", "name: ../../ran\n", "it is the name of a folder"),
    typed("a typed name that is a path", "name=../../ran", says="it is the name of a folder"),
    by_file("over what was typed", "name: '../../../../../ran'\n",
            "it is the name of a folder", "hydra.run.dir='elsewhere/${name}'"),
]  # fmt: skip

BOMBS = [
    by_file("aliases", f"optimizer:\n options:\n  a0: &a0 {{k: 1}}\n{LAUGHS}", "alias repeats"),
    by_file("an alias of itself", "optimizer: {options: &x {a: *x}}\n", "refers to itself"),
    by_file("references to text", f"optimizer:\n  options:\n    a0: {'x' * 40}\n{GROWING}",
            "references"),
    by_file("references to lists", f"optimizer:\n  options:\n    b0: [1, 2]\n{TREES}",
            "references"),
    by_file("a reference to itself", "name: ${name}\n", "refers to itself"),
    by_file("references in a circle", "optimizer: {options: {a: '${optimizer.options.b}', "
            "b: '${optimizer.options.a}'}}\n", "refers to itself"),
    by_file("made of text", "optimizer: {options: {d: $, a: \"${oc.decode:'${.d}{name}'}\"}}\n",
            "oc.decode"),
    by_file("a deep list", f"optimizer: {{options: {{a: {'[' * 500}{']' * 500}}}}}\n", "nested"),
    by_file("a long value", f"name: {BIG}\n", "70000 characters"),
    by_file("a long file", "# " + "x" * 300_000 + "\n", "larger than"),
    by_file("an object", "name: !!python/object/apply:os.mkdir [ran]\n", "the tag"),
    by_file("a name of Python's", "name: !!python/name:evil_pkg.Payload\n", "the tag"),
    by_file("a path of Python's", "name: !!python/object/apply:pathlib.PosixPath [a]\n", "the tag"),
    by_file("a tag of its own", "name: !evil x\n", "the tag"),
    by_file("a range", "hydra: {sweeper: {params: {seed: 'range(0,1000000000)'}}}\n",
            "1000000000 jobs", "-m"),
    by_file("codes in a parameter", "hydra: {sweeper: {params: {seed: \"1,'\\e[31m'\"}}}\n",
            "would not be shown", "-m"),
    typed("a typed range", "-m", "seed=range(0,1000000000)", says="1000000000 jobs"),
    typed("a shuffled range", "-m", "seed=shuffle(range(0,1e9))", says="jobs"),
    typed("a tiny step", "-m", "optimizer.lr=range(0,1,1e-12)", says="jobs"),
    typed("a product", "-m", "seed=range(0,100)", "training.steps=range(0,100)",
          "model.width=range(0,100)", says="1000000 jobs"),
    typed("a deep value", f"seed={'[' * 200}{']' * 200}", says="nested"),
    typed("deep references", f"name={'${' * 200}", says="nested"),
    typed("a typed long value", f"name={BIG}", says="70005 characters"),
    Case("many overrides", [f"+model.x{i}={i}" for i in range(1001)], says="1001 overrides"),
]  # fmt: skip

HOSTILE = [*CHANGING, *OUTSIDE, *ARMS, *CALLABLES, *LEVELS, *HYDRAS, *PLACED, *BOMBS]
__all__ = ["EXPERIMENT", "HOSTILE"]
