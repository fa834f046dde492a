"""docs/extending.md tells the truth: each example is written to a folder of a user's own and trained with."""

import re
import sys

import pytest
import tiny
from conftest import REPOSITORY

from jaxtrain import config as configs
from jaxtrain import train

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def blocks(section):
    """The code of a section: files by name, and the lines that change a config."""
    files, lines = {}, ""
    for code in re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL):
        name = re.match(r"# (my_lab/\w+\.py)\n", code)
        if name:
            files[name[1]] = code
        else:
            lines += code
    return files, lines


@pytest.fixture
def my_lab(tmp_path, monkeypatch):
    """A folder to work in, as the command line sees it."""
    (tmp_path / "my_lab").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [each for each in sys.modules if each.partition(".")[0] == "my_lab"]:
        del sys.modules[name]


def trained(section, folder):
    files, lines = blocks(section)
    for name, code in files.items():
        (folder / name).write_text(code)
    config = tiny.config(total="30st", report_every="10st", eval_every="30st", data="digits")
    exec(lines, {"config": config})
    return config, train.run(config)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_trains(section, my_lab):
    config, result = trained(section, my_lab)
    losses = [line["train/loss"] for line in result.history if "train/loss" in line]
    assert losses[-1] < losses[0]
    assert "my_lab" in configs.to_json(config)
    if section == "An evaluation":
        assert [line["step"] for line in result.history if "eval_worst/accuracy" in line] == [10, 20, 30]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_is_short(section):
    files, lines = blocks(section)
    assert len(files) == 1 and len(lines.splitlines()) <= 3
    (code,) = files.values()
    assert len([line for line in code.splitlines() if line.strip()]) <= 17
