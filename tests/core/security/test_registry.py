"""The door for dotted names: what passes, what is refused before it is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import torch

from runner.core.config.composing import compose
from runner.core.config.run_config import nested_targets
from runner.core.errors import ConfigError, SecurityError
from runner.core.security.registry import (
    SOURCES,
    construct,
    instantiate_nested,
    is_in_package,
    resolve,
    torch_names,
)

KEY = "model._target_"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's package in the current folder, with a sibling that must stay unimported."""
    folder = tmp_path / "door_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import os\nfrom os import system\nfrom functools import partial\n"
        "from door_loud import Loud\n"
        "half = partial(int, base=2)\n"
        "def build(width):\n    return width\n"
    )
    (folder / "nets.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, width, classes=2, depth=1):\n"
        "        super().__init__()\n        self.got = (width, classes, depth)\n"
        "    @classmethod\n    def small(cls):\n        return cls(1)\n"
    )
    (folder / "broken.py").write_text("import door_nowhere\n")
    (folder / "crooked.py").write_text("def (:\n")
    (tmp_path / "door_loud.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Loud: pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "door_pkg"
    for name in [n for n in sys.modules if n.startswith("door_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    """
    torch.nn.Linear torch.nn.modules.linear.Linear torch.optim.AdamW
    torch.utils.data.TensorDataset torch.nn.functional.relu
    torch.nn.init.xavier_uniform_ torch.optim.lr_scheduler.StepLR
    torch.utils.data.default_collate
    """.split(),
)
def test_public_classes_and_functions_of_torch_pass(target: str) -> None:
    assert resolve(target, KEY, []).__name__ == target.rpartition(".")[2]


REFUSED = """
os.system os.mkdir builtins.open builtins.eval shutil.copyfile venv.create subprocess.Popen
torch.load torch.hub.load torch.utils.collect_env.run setuptools._distutils.spawn.spawn
multiprocessing.util.spawnv_passfds uuid._get_command_stdout torch.os.mkdir pickle.loads
torch.nn.modules torch.nn.modules.module.OrderedDict torch.nn.modules.module.functools.partial
torch.nn.init.math torch.nn.init.math.sqrt torch.nn.Module.load_state_dict functools.partial
torch.optim.optimizer._RequiredParameter torch.utils._pytree.tree_map torch.nn.Linear.__init__
torch.utils.data.datapipes.iter.FileOpener torch.nn.functional.torch.load torch.nnx.Linear
torchx.nn.Linear runner.core.techniques.amp.Amp runner.core.security.registry.resolve
runner.core.models.nope
runner.cli.launch.os.mkdir runner.core.record.storage.replace_text importlib.import_module
hydra.utils.instantiate hydra.utils.get_method hydra._internal.utils._locate code.interact
omegaconf.OmegaConf.create pty.spawn ctypes.CDLL runpy.run_path pip.main timeit.timeit
""".split()


@pytest.mark.parametrize("target", REFUSED)
def test_everything_else_is_refused(target: str) -> None:
    before = set(sys.modules)
    with pytest.raises(SecurityError, match="trusted|plain dotted name"):
        resolve(target, KEY, [])
    assert set(sys.modules) == before


MALFORMED = ["door pkg.Net", "door_pkg.Net\n", "", *"""
. door_pkg .nets.Net door_pkg..Net door_pkg.nets:Net door_pkg.nets.Net() door_pkg.__init__.os
door_pkg.__class__ door_pkg.nets.Net.__init__ ../door_pkg dоor_pkg.Net
""".split()]  # fmt: skip
PASSED_ON = """
door_pkg.system door_pkg.os.system door_pkg.partial door_pkg.half door_pkg.Loud door_pkg.nets
door_pkg.nets.torch.load door_pkg.nets.torch.nn.Linear door_pkg.nets.Net.load_state_dict
""".split()


@pytest.mark.parametrize("target", MALFORMED + PASSED_ON)
def test_malformed_names_and_those_only_passed_on_are_refused(package: str, target: str) -> None:
    with pytest.raises(SecurityError):
        resolve(target, KEY, [package])


@pytest.mark.parametrize(
    "name",
    ["os", "builtins", "torch", "torch.nn", "hydra", "omegaconf", "runner", "runner.core.models",
     "sys", "subprocess", "importlib.util", "", "__main__", "."],
)  # fmt: skip
def test_packages_that_can_run_anything_are_never_trusted(name: str) -> None:
    with pytest.raises(SecurityError, match="security.trusted"):
        resolve("torch.nn.Linear", KEY, [name])


def test_a_name_that_is_not_trusted_is_refused_without_an_import(package: str) -> None:
    for trusted in ([], ["door_lou"]):  # which only begins alike
        with pytest.raises(SecurityError, match=f"{KEY}: door_loud.Loud .*trusted=.door_loud"):
            resolve("door_loud.Loud", KEY, trusted)
        assert not Path("ran").exists() and "door_loud" not in sys.modules


def test_classes_functions_and_class_methods_of_a_trusted_package_pass(package: str) -> None:
    assert resolve("door_pkg.build", KEY, [package])(3) == 3
    assert resolve("door_pkg.nets.Net", KEY, [package]).__name__ == "Net"
    assert resolve("door_pkg.nets.Net.small", KEY, [package])().got == (1, 2, 1)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("door_pkg.nets.Nett", "did you mean door_pkg.nets.Net"),
        ("door_pkg.nowhere.Net", "door_pkg has no 'nowhere'; it has build"),
        ("door_pkg.nets.Unlike", "door_pkg.nets has no 'Unlike'; it has Net"),
        ("door_pkg.broken.Net", "No module named 'door_nowhere'"),
        ("door_pkg.crooked.Net", "; correct that file"),
        ("door_absent.Net", "No module named 'door_absent'"),
    ],
)
def test_a_trusted_name_that_does_not_exist_is_an_error_in_one_line(
    package: str, target: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{KEY}: ") as error:
        resolve(target, KEY, [package, "door_absent"])
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_installed_package_wins_over_the_current_folder(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.delitem(sys.modules, "numpy.polynomial", raising=False)
    assert resolve("numpy.polynomial.Polynomial", KEY, ["numpy"]).__name__ == "Polynomial"
    assert sys.path[-1] == str(tmp_path)


class Net:
    """Takes two sizes that the data may know and one that it does not."""

    def __init__(self, width: int, classes: int, vocab: int = 7) -> None:
        self.got = (width, classes, vocab)


def test_construct_passes_the_arguments_and_the_sizes_that_are_named() -> None:
    sizes = {"classes": 10, "in_features": 64}
    assert construct(Net, {"width": 3}, sizes, "model").got == (3, 10, 7)
    assert construct(Net, {"width": 3, "classes": 4}, sizes, "model").got == (3, 4, 7)
    assert construct(dict, {"a": 1}, sizes, "model") == {"a": 1}
    problem = r"^model\.width: .*\+model\.width=.*width, classes, vocab; arguments called in_fea"
    with pytest.raises(ConfigError, match=problem):
        construct(Net, {}, sizes, "model")
    with pytest.raises(ConfigError, match=r"^model\.widht: .*did you mean \+model\.width"):
        construct(Net, {"widht": 3}, sizes, "model")

    def make(width: int) -> None:
        raise TypeError("from inside")

    with pytest.raises(TypeError, match="^from inside\nmake got model.width$"):
        construct(make, {"width": 1}, {}, "model")


def test_a_class_among_the_arguments_is_made_first_and_only_if_it_is_trusted(package: str) -> None:
    arguments = {"net": {"_target_": f"{package}.nets.Net", "width": 3}, "sizes": [1, 2]}
    found = list(nested_targets(arguments, "model"))
    assert found == [("model.net._target_", f"{package}.nets.Net")]

    def resolve_trusted(target: str, key: str) -> object:
        return resolve(target, key, [package])

    made = instantiate_nested(arguments, resolve_trusted, "model")
    assert made["net"].got == (3, 2, 1) and made["sizes"] == [1, 2]
    bad = {"inner": [{"_target_": "os.system", "command": "true"}]}
    with pytest.raises(SecurityError, match=r"model\.inner\.0\._target_: os\.system is refused"):
        instantiate_nested(bad, resolve_trusted, "model")
    with pytest.raises(SecurityError, match=r"model\.config\._target_: os\.system is refused"):
        compose(["model._target_=torch.nn.Linear", "+model.config._target_=os.system"])


def test_every_public_name_of_the_installed_torch_is_in_the_registry() -> None:
    names = set()
    for place in SOURCES:
        for name, value in vars(import_module(place)).items():
            home = str(getattr(value, "__module__", ""))
            own = is_in_package(home, place) and ".datapipes" not in home and name[0] != "_"
            if own and isinstance(value, type | FunctionType) and value.__name__ == name:
                names.add(f"{place}.{name}")
    missing = names - torch_names()
    enums = {"torch.nn.functional.ScalingType", "torch.nn.functional.SwizzleType"}
    assert missing <= {"torch.nn.factory_kwargs", "torch.utils.data.get_worker_info", *enums}


def test_positional_arguments_and_partials_are_made(package: str) -> None:
    made = instantiate_nested(
        {"a": {"_target_": "torch.nn.Linear", "_args_": [3, 2], "bias": False},
         "f": {"_target_": "torch.nn.functional.leaky_relu", "_partial_": True,
               "negative_slope": 0.5}},
        lambda target, key: resolve(target, key, []), "model",
    )  # fmt: skip
    assert made["a"].weight.shape == (2, 3) and made["a"].bias is None
    assert made["f"](torch.tensor(-2.0)) == -1.0
