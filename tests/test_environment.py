"""environment.json: every start is told, and what changed since the last one."""

import json
import subprocess
import sys
import types

import jax
import pytest

from jaxtrain.errors import StorageError, UserError
from jaxtrain.storage import environment


@pytest.fixture(scope="module")
def here() -> dict[str, object]:
    return environment.collect()


def test_it_says_what_the_run_ran_on(here):
    assert here["packages"]["jax"] == jax.__version__
    assert here["devices"] == "8 × cpu" and here["processes"] == 1
    assert "host_platform_device_count=8" in here["arithmetic"]["XLA_FLAGS"]
    assert here["surroundings"]["JAX_PLATFORMS"] == "cpu"
    assert here["python"] == ".".join(map(str, sys.version_info[:3])) and here["processor"]
    assert sys.executable.rpartition("/")[2] in here["command"] or "pytest" in here["command"]
    assert json.loads(json.dumps(here)) == here


def test_the_devices_are_those_of_the_run():
    assert environment.collect(devices=jax.devices()[:2])["devices"] == "2 × cpu"


def test_every_start_is_kept_and_an_unchanged_one_has_no_differences(tmp_path, here):
    later = here | {"time": "later", "command": "another", "pid": 1, "host": "elsewhere", "cores": 1}
    assert environment.record(tmp_path / "run", here) == ()
    assert environment.record(tmp_path / "run", later) == ()
    starts = environment.read(tmp_path / "run" / "environment.json")
    assert [start["time"] for start in starts] == [here["time"], "later"]


@pytest.mark.parametrize(
    "field, value, told",
    [
        ("devices", "4 × gpu H100", "devices 8 × cpu → 4 × gpu H100"),
        ("processes", 2, "processes 1 → 2"),
        ("python", "3.99.1", "→ 3.99.1"),
        ("packages", {"jax": "9.9"}, "→ 9.9"),
        ("arithmetic", {"XLA_FLAGS": "--xla_new"}, "→ --xla_new"),
        ("arithmetic", {"XLA_FLAGS": ""}, "→ none"),
        ("code", "abcdef", "→ abcdef"),
        ("modules", {"my_lab.nets": "12ab"}, "my_lab.nets none → 12ab"),
    ],
)
def test_what_may_change_a_result_is_told(field, value, told, tmp_path, here):
    environment.record(tmp_path, here)
    old = here[field]
    changed = here | {field: {**old, **value} if isinstance(value, dict) else value}
    (difference,) = environment.record(tmp_path, changed)
    assert told in difference and "\n" not in difference


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1', '{"format": 1}', '{"format": "x", "starts": []}'])
def test_a_damaged_file_is_named(content, tmp_path, here):
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(StorageError, match=f"{tmp_path}/environment.json"):
        environment.record(tmp_path, here)


def test_a_newer_format_is_refused_by_number(tmp_path, here):
    (tmp_path / "environment.json").write_text('{"format": 99, "starts": []}')
    with pytest.raises(UserError, match="format 99; this version reads up to 1"):
        environment.record(tmp_path, here)


def test_a_workdir_that_cannot_be_written_is_a_storage_error(tmp_path, here):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="environment.json"):
        environment.record(tmp_path / "file", here)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_the_revision_tells_commits_and_uncommitted_changes(tmp_path):
    assert environment.revision(tmp_path) is None
    code = tmp_path / "code"
    code.mkdir()
    git(tmp_path, "init", "-q")
    (code / "a.py").write_text("a = 1\n")
    git(tmp_path, "add", "code")
    git(tmp_path, "commit", "-q", "-m", "one")
    clean = environment.revision(code)
    (code / "a.py").write_text("a = 2\n")
    changed = environment.revision(code)
    (code / "a.py").write_text("a = 3\n")
    assert len({clean, changed, environment.revision(code)}) == 3
    assert changed.startswith(f"{clean}+")
    (tmp_path / "installed").mkdir()
    assert environment.revision(tmp_path / "installed") is None  # in somebody's checkout, but no part of it


def test_no_git_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.revision(tmp_path) is None


def test_a_users_package_is_hashed_as_far_as_it_is_loaded(tmp_path, monkeypatch):
    for name in ("lab", "lab.nets", "lab.layers"):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
        monkeypatch.setitem(sys.modules, name, module)
    first = environment.source_hash("lab.nets")
    assert first == environment.source_hash("lab.nets") and len(first) == 16
    (tmp_path / "lab.layers.py").write_text("# another\n")
    assert environment.source_hash("lab.nets") != first
    assert environment.source_hash("not_loaded.at_all") is None


def test_a_module_of_a_notebook_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cell", types.ModuleType("cell"))
    assert environment.source_hash("cell") is None
