"""Files that want to run code when they are read: checkpoints and parameter files. None of it runs.

The code of all of them is "make this marker".
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fulgurite import cli

MODULE = "read_by_malicious_files"

PARTS = """\
import subprocess
from collections.abc import Callable
from subprocess import check_output
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, anything=None, function: Callable | None = None,
                 layer: torch.nn.Module = None, functions: list[Callable] = (),
                 kind: type | None = None, **more):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def loader():
    return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=4)
def rows():
    return TensorDataset(torch.ones(4, 4))
"""

MARKER = "the_code_has_run"
TOUCH = f"touch {MARKER}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the modules of the files lie there, and the marker would."""
    (tmp_path / f"{MODULE}.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return tmp_path


def described(**changes: Any) -> dict[str, Any]:
    """A parameter file that runs; ``changes`` are keys of ``init``, or ``fit``."""
    loader = {"data_processor": f"{MODULE}.loader"}
    init = {
        "device": "CPU",
        "model_dir": "out",
        "model": {"class_path": f"{MODULE}.Net"},
        "loop": {"max_steps": 1},
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    fit = changes.pop("fit", {"train_dataloader": loader})
    trainer = {"init": {**init, **changes}, "fit": fit, "validate": {"val_dataloader": loader}}
    return {"trainer": trainer}


# -- checkpoints --------------------------------------------------------------------------------


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """Only what can be called can be pickled as the function of a call."""


class Built:
    """Pickles as a new object whose state is set by the object's own code."""

    def __setstate__(self, state: Any) -> None:
        os.system(TOUCH)

    def __getstate__(self) -> Any:
        return {"a": 1}


PYTHON = f"__import__('os').mkdir({MARKER!r})"
NESTED = io.BytesIO()
torch.save(Runs(os.system, TOUCH), NESTED)

CALLS: dict[str, Any] = {
    "os.system": Runs(os.system, TOUCH),
    "subprocess.Popen": Runs(subprocess.Popen, TOUCH.split()),
    "subprocess.check_output": Runs(subprocess.check_output, TOUCH.split()),
    "eval": Runs(eval, PYTHON),
    "exec": Runs(exec, PYTHON),
    "os.mkdir": Runs(os.mkdir, MARKER),
    "partial": Runs(Runs(functools.partial, os.system, TOUCH)),
    "a call of getattr": Runs(Runs(getattr, Runs(__import__, "os"), "system"), TOUCH),
    "__setstate__": Built(),
    "torch.load in torch's own": Runs(torch.storage._load_from_bytes, NESTED.getvalue()),
}

EVIL = CALLS["os.system"]
MODEL = {"layer.weight": torch.ones(1, 4), "layer.bias": torch.ones(1)}
WHOLE: dict[str, Any] = {
    "epoch": 0,
    "global_step": 1,
    "pytorch-lightning_version": "2.6.6",
    "state_dict": MODEL,
    "loops": {},
    "callbacks": {},
    "optimizer_states": [],
    "lr_schedulers": [],
}

PLACES: dict[str, Any] = {
    "top level": EVIL,
    "state_dict": {**WHOLE, "state_dict": {**MODEL, "layer.bias": EVIL}},
    "state_dict whole": {**WHOLE, "state_dict": EVIL},
    "a key": {**WHOLE, "state_dict": {**MODEL, (EVIL,): 1}},
    "optimizer_states": {**WHOLE, "optimizer_states": [{"state": {0: EVIL}, "param_groups": []}]},
    "lr_schedulers": {**WHOLE, "lr_schedulers": [{"last_epoch": EVIL}]},
    "callbacks": {**WHOLE, "callbacks": {"Checkpoint": {"saved": EVIL}}},
    "hyper_parameters": {**WHOLE, "hyper_parameters": {"width": EVIL}},
    "datamodule": {**WHOLE, "datamodule_hyper_parameters": {"width": EVIL}, "FileData": EVIL},
    "loops": {**WHOLE, "loops": {"fit_loop": {"state_dict": EVIL}}},
    "fulgurite": {**WHOLE, "fulgurite": {"torch": EVIL}},
    "precision": {**WHOLE, "MixedPrecision": {"scale": EVIL}, "native_amp_scaling_state": EVIL},
    "version": {**WHOLE, "pytorch-lightning_version": EVIL},
    "of nobody": {**WHOLE, "something_else": EVIL},
}


def by_torch(data: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(data, stream, **options)
    return stream.getvalue()


def as_tar() -> bytes:
    """The form of torch before 0.1.10."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps(EVIL, protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def as_script() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), stream)
    return stream.getvalue()


OLD = {"_use_new_zipfile_serialization": False}
OF_HAND = f"cos\nsystem\n(S'{TOUCH}'\ntR.".encode()
CHECKPOINTS: dict[str, Callable[[], bytes]] = {
    **{f"in {at}": functools.partial(by_torch, data) for at, data in PLACES.items()},
    **{
        f"{name} called": functools.partial(by_torch, {**WHOLE, "hyper_parameters": {"a": call}})
        for name, call in CALLS.items()
    },
    **{
        f"old format, in {at}": functools.partial(by_torch, PLACES[at], **OLD)
        for at in ("top level", "hyper_parameters", "state_dict")
    },
    **{
        f"a bare pickle, protocol {protocol}": functools.partial(
            pickle.dumps, PLACES["hyper_parameters"], protocol=protocol
        )
        for protocol in range(6)
    },
    "a bare pickle by hand": lambda: OF_HAND,
    "an INST instruction": lambda: f"(S'{TOUCH}'\nios\nsystem\n.".encode(),
    "an OBJ instruction": lambda: b"(cos\nsystem\nS'" + TOUCH.encode() + b"'\no.",
    "protocol 4 in torch's zip": lambda: by_torch(PLACES["hyper_parameters"], pickle_protocol=4),
    "a tar": as_tar,
}

RESUMES = {
    "autoload": (["fit"], "out/checkpoint_1.ckpt"),
    "ckpt_path": (["validate", "--ckpt_path", "evil.ckpt"], "evil.ckpt"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_no_code_of_a_checkpoint_runs(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(described()))
    (folder / "out").mkdir()
    for arguments, file in RESUMES.values():
        (folder / file).write_bytes(CHECKPOINTS[name]())
        assert cli.main([arguments[0], "run.yaml", *arguments[1:]]) == 1
        assert file in capsys.readouterr().err
        assert not Path(MARKER).exists()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Popen's process
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "a tar"])
def test_the_code_would_run_if_it_were_let(name: str, folder: Path) -> None:
    content = io.BytesIO(CHECKPOINTS[name]())
    try:
        if name.startswith(("a bare", "an ")):
            pickle.load(content)
        else:
            torch.load(content, weights_only=False)
    except AttributeError:  # of torch's old format: what stands there is no dict, but has run
        pass
    for _ in range(100):  # Popen does not wait
        if Path(MARKER).exists():
            break
        subprocess.run(["sleep", "0.01"], check=True)
    assert Path(MARKER).exists()


@pytest.mark.filterwarnings("ignore:.*looks like a TorchScript archive")
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")
def test_a_program_of_torchscript_is_no_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(described()))
    (folder / "evil.ckpt").write_bytes(as_script())
    assert cli.main(["validate", "run.yaml", "--ckpt_path", "evil.ckpt"]) == 1
    assert "evil.ckpt" in capsys.readouterr().err


# -- parameter files ----------------------------------------------------------------------------

TAGS = {
    "apply": f"!!python/object/apply:os.system ['{TOUCH}']",
    "apply with keys": f"!!python/object/apply:os.system {{args: ['{TOUCH}']}}",
    "new": f"!!python/object/new:subprocess.Popen [[touch, {MARKER}]]",
    "name": "!!python/name:os.system",
    "module": "!!python/module:antigravity",
    "object": "!!python/object:subprocess.Popen {args: touch}",
    "tuple of apply": f"!!python/tuple [!!python/object/apply:os.system ['{TOUCH}']]",
    "a local tag": "!os.system touch",
    "a verbatim tag": f"!<tag:yaml.org,2002:python/object/apply:os.system> ['{TOUCH}']",
}


@pytest.mark.parametrize("where", ["value", "key", "anchor"])
@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS)
def test_no_code_of_a_tag_runs(tag: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml.safe_dump(described())
    text += {"value": f"x: {tag}\n", "key": f"? {tag}\n: 1\n", "anchor": f"x: &a {tag}\ny: *a\n"}[
        where
    ]
    Path("run.yaml").write_text(text)
    for command in ("check", "fit"):
        assert cli.main([command, "run.yaml"]) == 1
        assert "run.yaml:" in "".join(capsys.readouterr())
        assert not Path(MARKER).exists()


def called(path: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments or {}}


SYSTEM = called("os.system", {"command": TOUCH})
CODE: dict[str, dict[str, Any]] = {
    "os.system": SYSTEM,
    "subprocess.Popen": called("subprocess.Popen", {"args": TOUCH.split()}),
    "subprocess.check_output": called("subprocess.check_output", {"args": TOUCH.split()}),
    "subprocess.run": called("subprocess.run", {"args": TOUCH.split()}),
    "eval": called("builtins.eval", {"source": PYTHON}),
    "exec": called("builtins.exec", {"source": PYTHON}),
    "open": called("builtins.open", {"file": MARKER, "mode": "w"}),
    "io.FileIO": called("io.FileIO", {"file": MARKER, "mode": "w"}),
    "partial": called("functools.partial", {"func": SYSTEM}),
    "mkdir": called("os.makedirs", {"name": MARKER}),
    "shutil": called("shutil.copy", {"src": "run.yaml", "dst": MARKER}),
    "pathlib's method": called("pathlib.Path.touch", {"self": MARKER}),
    "through a module": called(f"{MODULE}.subprocess.check_output", {"args": TOUCH.split()}),
    "imported elsewhere": called(f"{MODULE}.check_output", {"args": TOUCH.split()}),
    "through torch": called("torch.os.system", {"command": TOUCH}),
    "a pickle": called("torch.load", {"f": "evil.pt", "weights_only": False}),
    "an array": called("numpy.load", {"file": "evil.npy", "allow_pickle": True}),
    "an array, by its other name": called(
        "numpy.lib._npyio_impl.load", {"file": "evil.npy", "allow_pickle": True}
    ),
    "a library": called("numpy.ctypeslib.load_library", {"libname": "evil", "loader_path": "."}),
    "a repository": called("torch.hub.load", {"repo_or_dir": ".", "model": "x", "source": "local"}),
}
DOORS: dict[str, dict[str, Any]] = {
    "yaml": called("yaml.unsafe_load", {"stream": f"!!python/object/apply:os.system ['{TOUCH}']"}),
    "a checkpoint": called(
        "lightning.fabric.utilities.cloud_io._load",
        {"path_or_url": "evil.pt", "weights_only": False},
    ),
    "a checkpoint of a module": called(
        f"{MODULE}.Net.load_from_checkpoint", {"checkpoint_path": "evil.pt", "weights_only": False}
    ),
    "a command": called("torch.utils.collect_env.run", {"command": TOUCH}),
    "processes": called("torch.distributed.run.main", {"args": ["--no-python", *TOUCH.split()]}),
    "a source": called("torch.fx.graph_module._exec_with_source", {"src": PYTHON, "globals": {}}),
    "kept code": called("torch._inductor.codecache.PyCodeCache.load", {"source_code": PYTHON}),
    "an expression": called("sympy.sympify", {"a": PYTHON}),
    "a measurement": called("numpy.testing.measure", {"code_str": PYTHON}),
    "a file in memory": called("numpy.memmap", {"filename": MARKER, "shape": 4, "mode": "w+"}),
    "a file in torch's memory": called(
        "torch.from_file", {"filename": MARKER, "shared": True, "size": 4}
    ),
    "a graph's source": called(
        "torch.fx.graph_module.reduce_graph_module",
        {"import_block": "", "body": {"_code": f"{PYTHON}\ndef forward(self, x): return x\n"}},
    ),
    "a package of modules": called("torch.package.PackageImporter", {"file_or_buffer": "evil.pt"}),
    "a pipe that decodes files": called(
        "torch.utils.data.datapipes.iter.Mapper",
        {
            "fn": "torch.utils.data.datapipes.utils.decoder.basichandlers",
            "datapipe": called("torch.utils.data.datapipes.iter.FileOpener", {"datapipe": ["a"]}),
        },
    ),
    "a template": called(
        "torch.utils.data.datapipes.gen_pyi.gen_from_template",
        {"dir": ".", "template_name": "run.yaml", "output_name": MARKER, "replacements": []},
    ),
    "a caller of functions": called(
        "torch.fx.experimental.proxy_tensor.get_isolated_graphmodule",
        {"func": "torch.from_file", "args": [MARKER, True, 4], "kwargs": {}},
    ),
    "a module elsewhere": called(
        "torch.distributed.nn.RemoteModule",
        {"remote_device": "x/cpu", "module_cls": "torch.nn.ReLU"},
    ),
    "a worker's loop": called("torch.utils.data._utils.worker._worker_loop"),
    "a program of torchscript": called("torch.import_ir_module", {"filename": "evil.pt"}),
    "a text of numbers": called("numpy.savetxt", {"fname": MARKER, "X": [1.0]}),
}
"""What installed packages hold that acts, and no list of what is bad would have in full."""


def net(**arguments: Any) -> dict[str, Any]:
    return {"model": called(f"{MODULE}.Net", arguments)}


def fits(loader: Any) -> dict[str, Any]:
    return {"fit": {"train_dataloader": loader}}


def flat(code: dict[str, Any]) -> dict[str, Any]:
    return {"data_processor": code["class_path"], **code["init_args"]}


WHERE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "model": lambda code: {"model": code},
    "optimizer": lambda code: {"optimizer": code},
    "scheduler": lambda code: {"optimizer": "SGD", "schedulers": [code]},
    "callback": lambda code: {"callbacks": [code]},
    "callback by key": lambda code: {"callbacks": [{code["class_path"]: code["init_args"]}]},
    "logger": lambda code: {"loggers": [code], "logger": None},
    "lightning's logger": lambda code: {"logger": code},
    "profiler": lambda code: {"profiler": code},
    "plugin": lambda code: {"plugins": [code]},
    "strategy": lambda code: {"strategy": code},
    "accelerator": lambda code: {"accelerator": code},
    "loader": lambda code: fits(flat(code)),
    "loader by class_path": lambda code: fits(code),
    "dataset's argument": lambda code: fits({**LOADER, "collate_fn": code}),
    "collate_fn": lambda code: fits({**LOADER, "collate_fn": code["class_path"]}),
    "worker_init_fn": lambda code: fits({**LOADER, "worker_init_fn": code["class_path"]}),
    "sampler": lambda code: fits({**LOADER, "sampler": code}),
    "argument of any kind": lambda code: net(anything=code),
    "deep in an argument": lambda code: net(anything=[{"a": [code]}]),
    "argument of **more": lambda code: net(more=code),
    "function as an argument": lambda code: net(function=code["class_path"]),
    "function with arguments": lambda code: net(function=code),
    "list of functions": lambda code: net(functions=[code["class_path"]]),
    "class as an argument": lambda code: net(kind=code["class_path"]),
    "module as an argument": lambda code: net(layer=code),
}
LOADER = {"data_processor": f"{MODULE}.rows"}


@pytest.fixture
def pickled(folder: Path) -> None:
    """What ``torch.load``, ``numpy.load`` and ``torch.hub.load`` of a file would run."""
    np.save(folder / "evil.npy", np.array([EVIL], dtype=object), allow_pickle=True)
    (folder / "evil.pt").write_bytes(by_torch(EVIL))
    (folder / "hubconf.py").write_text(f"import os\nos.system({TOUCH!r})\ndef x(): pass\n")


WHOLLY = ("model", "loader", "argument of any kind", "function as an argument")
"""Places where all of ``CODE`` is tried; at the others, three of it."""

PAIRS = [
    (where, code)
    for where in WHERE
    for code in (CODE if where in WHOLLY else ("os.system", "subprocess.Popen", "through a module"))
] + [(where, code) for where in ("model", "argument of any kind") for code in DOORS]


@pytest.mark.usefixtures("pickled")
@pytest.mark.parametrize(("where", "code"), PAIRS)
def test_no_code_that_a_parameter_file_names_where_something_else_stands_runs(
    where: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(described(**WHERE[where]((CODE | DOORS)[code]))))
    for command in ("check", "fit"):
        status = cli.main([command, "run.yaml"])
        assert not Path(MARKER).exists()
        told = "".join(capsys.readouterr())
        assert status == 1, told
        assert "run.yaml:" in told


@pytest.mark.parametrize("code", CODE)
def test_without_imports_pythons_own_is_refused_by_its_name(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(described(**net(anything=[CODE[code]]))))
    refused = cli.main(["check", "--no-imports", "run.yaml"]) == 1
    named = CODE[code]["class_path"]
    assert MODULE not in sys.modules
    assert refused or named.startswith((MODULE, "torch.", "numpy."))
    assert named in capsys.readouterr().out


def listing(package: str, **changes: Any) -> None:
    """Write a file that trusts a package."""
    Path("run.yaml").write_text(yaml.safe_dump({"imports": [package], **described(**changes)}))


@pytest.mark.parametrize(
    "name", ["numpy.load", "numpy.lib._npyio_impl.load", "yaml.unsafe_load", "sympy.sympify"]
)
def test_functions_that_run_what_a_file_holds_are_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listing(name.partition(".")[0], **net(anything=called(name)))
    assert cli.main(["check", "run.yaml"]) == 1
    assert "runs what a file or an address holds" in capsys.readouterr().out


def test_packages_are_trusted_by_the_file_or_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listing("numpy", **net(function="numpy.loadtxt"))
    assert cli.main(["check", "run.yaml"]) == 0
    Path("run.yaml").write_text(yaml.safe_dump(described(**net(function="numpy.loadtxt"))))
    assert cli.main(["check", "run.yaml"]) == 1
    told = capsys.readouterr().out
    assert "run.yaml:15:9: trainer.init.model.init_args.function: numpy.loadtxt is of the" in told
    assert "or --set 'imports=[numpy]'" in told
    assert cli.main(["check", "run.yaml", "--set", "imports=[numpy]"]) == 0


@pytest.mark.parametrize(
    "name",
    [
        "numpy.exp",
        "numpy.random.default_rng",
        f"{MODULE}.torch.utils.collect_env.run",
        "torch.save",
    ],
)
def test_what_is_of_another_package_is_of_it_through_a_module_of_ones_own_too(
    name: str, folder: Path
) -> None:
    (folder / "passes_on.py").write_text("import numpy, torch.utils.collect_env")
    name = name if name.startswith(MODULE) else f"passes_on.{name}"
    Path("run.yaml").write_text(yaml.safe_dump(described(**net(anything=called(name)))))
    assert cli.main(["check", "run.yaml"]) == 1


@pytest.mark.fits
def test_the_file_around_the_code_is_a_good_one() -> None:
    Path("run.yaml").write_text(
        yaml.safe_dump(described(**net(function="torch.nn.functional.relu")))
    )
    assert cli.main(["fit", "run.yaml"]) == 0
