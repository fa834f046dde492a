"""The command line: what reaches the run, and that a mistake costs one line, exit code 2 and nothing else."""

import gc
import os
import pathlib
import subprocess
import sys
import types

import pytest

from jaxtrain import config as configs
from jaxtrain import errors
from jaxtrain import main as entry
from jaxtrain.machine import devices

ME = __name__
CONFIG = f"""
from jaxtrain.config import base_config

def get_config(smoke: bool = False, width: int = 8):
    config = base_config()
    config.model = dict(name="{ME}:Net", width=width)
    config.batch_size = 16 if smoke else 32
    return config
"""
MISSPELT = """
from jaxtrain.config import base_config

def get_config():
    config = base_config()
    config.larning_rate = 3
    return config
"""
UNREAD_OPTION = """
from jaxtrain.config import base_config

def get_config():
    config = base_config()
    config.optimizer = dict(name="sgd", learning_rate=0.1, momentm=0.9)
    return config
"""


class Net:
    def __init__(self, width: int = 8, depth: int = 1):
        self.width = width


class Other:
    def __init__(self, depth: int = 1):
        self.depth = depth


class FakeTrain:
    """Stands in for `jaxtrain.train` and `jaxtrain.describe`: remembers what reached it."""

    def __init__(self):
        self.calls: list[dict] = []
        self.exit_code = 0
        self.error: BaseException | None = None

    def run(self, config, workdir=None, **flags):
        self.calls.append({"config": config, "workdir": workdir, **flags})
        if self.error:
            raise self.error
        return types.SimpleNamespace(exit_code=self.exit_code)

    def describe(self, config):
        return f"model {config.model.name}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a config file my.py in it and two bad ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in (("my.py", CONFIG), ("misspelt.py", MISSPELT), ("unread.py", UNREAD_OPTION)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def train(folder, monkeypatch):
    fake = FakeTrain()
    monkeypatch.setattr(entry, "_imported", lambda name: fake)
    monkeypatch.setattr(devices, "prepare", lambda config: None)
    return fake


def files(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


MY = "--config=my.py"
MISTAKES = [
    ([], ["no config given", "--config=configs/digits.py"]),
    (["my.py"], ["unknown argument 'my.py'", "--config"]),
    ([MY, "--wrkdir=x"], ["unknown argument '--wrkdir=x'", "'--workdir'", "--mode"]),
    ([MY, "--work=x"], ["unknown argument '--work=x'"]),  # no abbreviations: a later flag would change them
    ([MY, "--mode=tain"], ["--mode", "'tain'", "'train'", "eval"]),
    ([MY, "--profile=5"], ["--profile", "'5'", "START:STOP"]),
    ([MY, "--profile=9:3"], ["--profile", "'9:3'"]),
    ([MY, "--workdir"], ["--workdir", "expected one argument"]),
    ([MY, "--debug=yes"], ["--debug"]),
    ([MY, "config.lr=3"], ["config.lr=3", "write --config.lr=3"]),
    ([MY, "config.model.width=3"], ["write --config.model.width=3"]),
    ([MY, "seed=3"], ["seed=3", "write --config.seed=3"]),
    ([MY, "--seed=3"], ["--seed=3", "write --config.seed=3"]),
    ([MY, "--model.width=3"], ["write --config.model.width=3"]),
    (
        [MY, "--config.tensorboard", "false"],
        ["--config.tensorboard has no value", "--config.tensorboard=false"],
    ),
    ([MY, "--config.tensorboard"], ["--config.tensorboard has no value"]),
    ([MY, "--config.seed", "3", "--config.ema=0"], ["write --config.seed=3"]),
    ([MY, "--config.sed=3"], ["--config.sed=3", "no config.sed", "'config.seed'", "batch_size"]),
    ([MY, "--config.lr=3"], ["no config.lr", "'config.optimizer.learning_rate'"]),
    ([MY, "--config.seed=x"], ["--config.seed=x", "an int"]),
    ([MY, "--config.model.wdth=3"], ["no option 'wdth'", "'width'", "depth"]),
    ([MY, "--config.model.width=big"], ["--config.model.width=big", "an int"]),
    ([MY, "--config.model=resnt"], ["unknown model 'resnt'", "'resnet'", "cnn"]),
    ([MY, "--config.task=clasification"], ["unknown task", "'classification'"]),
    ([MY, "--config.optimizer=adamm"], ["unknown optimizer 'adamm'", "'adam'"]),
    ([MY, "--config.data=digit"], ["unknown data set 'digit'", "'digits'", "tfds"]),
    ([MY, "--config.augment=flp"], ["unknown augmentation 'flp'", "'flip'"]),
    ([MY, "--config.schedule=cosin"], ["unknown schedule 'cosin'", "'cosine'"]),
    ([MY, "--config.schedule.warmup=2"], ["config.schedule.warmup is 2"]),
    ([MY, "--config.total=10"], ["config.total is '10'", "'10ep'"]),
    ([MY, "--config.accumulate=5"], ["config.accumulate is 5", "batch_size"]),
    ([MY, "--config.model=my_lab.nets:unet"], ["no module 'my_lab'"]),
    (["--config=my.py:smok"], ["my.py has no option 'smok'", "'smoke'"]),
    (["--config=my.py:width=big"], ["width is 'big'", "an int"]),
    (["--config=nowhere.py"], ["no config file 'nowhere.py'"]),
    (["--config=configs/digit.py"], ["no config file 'configs/digit.py'", "'configs/digits.py'"]),
    (["--config=misspelt.py"], ["misspelt.py line 6", "no config.larning_rate", "optimizer.learning_rate"]),
    (["--config=unread.py"], ["unread.py", "no option 'momentm'", "'momentum'"]),
]


@pytest.mark.parametrize(("argv", "expected"), MISTAKES, ids=lambda each: " ".join(each)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(train, folder, capfd, argv, expected):
    before = files(folder)
    assert entry.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("jaxtrain: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert [text for text in expected if text not in err] == [], err
    assert files(folder) == before
    assert train.calls == []


def run_python(program: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    repository = pathlib.Path(entry.__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize(
    "argv",
    [
        ["--config=configs/digits.py", "--config.sed=1"],
        ["--config=configs/cifar.py", "--config.model.wdth=1"],
    ],
)
def test_a_mistake_in_a_new_process_imports_no_tensorflow(folder, argv):
    before = files(folder)
    program = (
        "import sys\nfrom jaxtrain.main import main\n"
        f"code = main({argv!r})\n"
        "assert not {'tensorflow', 'tensorflow_datasets', 'sklearn'} & set(sys.modules)\nsys.exit(code)\n"
    )
    done = run_python(program, folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert files(folder) == before


def test_help_lists_every_key_without_importing_jax(folder):
    program = (
        "import sys\nfrom jaxtrain.main import main\n"
        "try:\n    main(['--help'])\nfinally:\n    assert 'jax' not in sys.modules\n"
    )
    done = run_python(program, folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert [key for key in configs.KEYS if f"  {key} " not in done.stdout] == []
    assert all(text in done.stdout for text in ("--workdir", "--profile", "configs/digits.py", "run keys"))


def test_flags_and_overrides_reach_the_run(train):
    argv = ["--config=my.py:smoke,width=3", "--config.model.depth=5", "--config.devices=0,1", "--workdir=w"]
    assert entry.main([*argv, "--mode=eval", "--profile=5:8", "--debug"]) == 0
    (call,) = train.calls
    config = call.pop("config")
    assert call == {"workdir": "w", "mode": "eval", "profile": (5, 8), "debug": True}
    assert (config.batch_size, config.devices) == (16, (0, 1))
    assert config.model.to_dict() == {"name": f"{ME}:Net", "width": 3, "depth": 5}


def test_a_flag_may_stand_apart_from_its_value(train):
    assert entry.main(["--config", "my.py", "--mode", "eval", "--workdir", "w"]) == 0
    assert (train.calls[0]["workdir"], train.calls[0]["mode"]) == ("w", "eval")


def test_without_a_workdir_the_same_run_gets_the_same_folder_and_another_run_another(train):
    for argv in ([], ["--config.prefetch=5"], ["--config.model.width=8"], ["--config.seed=1"]):
        assert entry.main([MY, *argv]) == 0
    folders = [str(call["workdir"]) for call in train.calls]
    assert folders[0] == f"runs/my-{configs.run_hash(train.calls[0]['config'])}"
    assert folders[0] == folders[1] == folders[2] != folders[3]


def test_print_shows_and_runs_nothing(train, folder, capsys):
    before = files(folder)
    assert entry.main([MY, "--print"]) == 0
    assert f"model {ME}:Net" in capsys.readouterr().out
    assert train.calls == []
    assert files(folder) == before


def test_a_dropped_option_is_told(train, capsys):
    assert entry.main([MY, f"--config.model={ME}:Other"]) == 0
    out = capsys.readouterr().out
    assert f"config.model is '{ME}:Other' now" in out
    assert "width=8" in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UserError("a"), 2),
        (errors.NonFiniteError("a"), 3),
        (errors.StorageError("a\nb"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_their_exit_code(train, capsys, error, code):
    train.error = error
    assert entry.main([MY]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == (0 if code == 130 else 1)
    assert "\033" not in err


@pytest.mark.parametrize("code", [0, 130, 143])
def test_the_result_has_the_last_word_on_the_exit_code(train, code):
    train.exit_code = code
    assert entry.main([MY]) == code


def test_a_bug_keeps_its_traceback(train):
    train.error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        entry.main([MY])


@pytest.mark.parametrize(("colour", "red"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_mistake_is_red_on_a_terminal(train, monkeypatch, capsys, colour, red):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in colour.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert entry.main([]) == 2
    assert capsys.readouterr().err.startswith("\033[31m") is red


def test_a_users_module_beside_the_config_is_found(train, folder):
    (folder / "lab_beside.py").write_text("def net(size: int = 1):\n    return size\n")
    assert entry.main([MY, "--config.model=lab_beside:net", "--config.model.size=4"]) == 0
    assert train.calls[0]["config"].model.size == 4


def test_garbage_is_collected_again_when_a_run_begins(train, monkeypatch):
    """The process leaves it from its start until all is imported."""
    seen, run = [], train.run

    def watched(*arguments, **flags):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return run(*arguments, **flags)

    train.run = watched
    monkeypatch.setattr(entry, "_imported", lambda name: seen.append(gc.isenabled()) or train)
    monkeypatch.setattr(entry.exits, "on_signal", lambda: None)
    monkeypatch.setattr(sys, "argv", ["jaxtrain", MY])
    try:
        with pytest.raises(SystemExit) as end:
            entry.command()
    finally:
        gc.enable()
        gc.unfreeze()
    assert not end.value.code and seen == [False, (True, True)]
