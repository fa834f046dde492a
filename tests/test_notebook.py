"""The notebook's side: the quickstart runs as it stands, and what only a kernel does (Stop, live curves, threads)."""

import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import textwrap
import tomllib

import jax
import jupyter_client
import nbclient
import nbformat
import numpy as np
import pytest
import tiny
from conftest import QUICK_FLAGS
from packaging.requirements import Requirement

import jaxtrain
from jaxtrain import train
from jaxtrain.errors import UserError
from jaxtrain.loop import stopping

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
QUICKSTART = REPOSITORY / "notebooks" / "quickstart.ipynb"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
NEEDS = [Requirement(text) for text in PROJECT["dependencies"]]
JAX = next(need.specifier for need in NEEDS if need.name == "jax")


@pytest.fixture(scope="module")
def environment():
    """That of a user's kernel: one device, and this checkout."""
    return os.environ | {
        "XLA_FLAGS": QUICK_FLAGS,
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests"))),
    }


def test_the_committed_quickstart_is_valid_and_holds_no_outputs():
    notebook = nbformat.read(QUICKSTART, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells) > 10
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.slow
def test_the_quickstart_runs_from_top_to_bottom(environment, tmp_path):
    notebook = nbformat.read(QUICKSTART, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert outputs["install"] == []
    pictures = {name: sum("image/png" in each.get("data", {}) for each in outputs[name]) for name in outputs}
    expected = {"train": 1, "curves": 1, "predict": 2, "state": 2, "model": 1, "step": 1}
    assert pictures == expected | dict.fromkeys(pictures.keys() - expected, 0)
    steps = re.match(r"Result\(step (\d+) of \1, ", outputs["train"][-1].data["text/plain"]).group(1)
    text = "".join(each.get("text", "") for each in outputs["hand"] + outputs["save"])
    assert "step 20: loss" in text and f"loaded Trained(step {steps})" in text


def first_cell():
    return next(cell.source for cell in nbformat.read(QUICKSTART, as_version=4).cells if cell.id == "install")


def installed_pips(monkeypatch, versions, repository="git+https://example.org/jaxtrain"):
    """What the first cell asks of pip where jaxtrain is missing and `versions` are installed."""
    calls = []

    def version(name):
        if versions.get(name):
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    def run(command, check):
        assert check and command[:4] == [sys.executable, "-m", "pip", "install"]
        calls.append([each for each in command[4:] if not each.startswith("-")])
        sys.modules["jaxtrain"] = jaxtrain

    monkeypatch.setitem(sys.modules, "jaxtrain", None)  # any import of it fails
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: PROJECT["dependencies"])
    monkeypatch.setattr(subprocess, "run", run)
    source = first_cell()
    assert source.startswith('REPOSITORY = ".."')
    exec(source.replace('".."', repr(repository), 1), {})
    return calls


def everything(**changes):
    """All that jaxtrain needs, as installed; "" for what is not there."""
    found = {need.name: next(iter(need.specifier)).version for need in NEEDS}
    return found | {"tensorflow": "", "jaxlib": found["jax"]} | {k.replace("_", "-"): v for k, v in changes.items()}


def test_the_first_cell_installs_only_jaxtrain_where_the_rest_is_there(monkeypatch):
    assert installed_pips(monkeypatch, everything()) == [["git+https://example.org/jaxtrain"]]


PINS = ["jax==0.99", "jaxlib==0.99"]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        (dict(flax="0.8.0"), PINS),
        (dict(flax=""), PINS),
        (dict(flax="", jax_cuda12_plugin="0.99"), [*PINS, "jax-cuda12-plugin==0.99"]),
        (dict(flax="", jax="0.99+local", jaxlib="0.99.1rc1"), ["jax==0.99+local", "jaxlib==0.99.1rc1"]),
        (dict(tensorflow_cpu="", tensorflow="2.99"), []),  # as on Colab
        (dict(jax="0.4.30", jaxlib="0.4.30"), [f"jax{JAX}"]),
        (dict(jax="0.4.30", jaxlib="0.4.30", jax_cuda12_plugin="0.4.30"), [f"jax[cuda12]{JAX}"]),
        (dict(jax="", jaxlib=""), [f"jax{JAX}"]),
        (dict(jax="", libtpu="0.0.30"), [f"jax[tpu]{JAX}"]),
    ],
)
def test_the_first_cell_keeps_a_jax_that_is_in_range(changes, asked, monkeypatch):
    versions = everything(**dict(jax="0.99", jaxlib="0.99") | changes)
    (_, *more) = installed_pips(monkeypatch, versions)
    requirements = [Requirement(each) for each in sum(more, [])]
    family = ("jax", "jaxlib", "jax-cuda12-plugin", "libtpu")
    assert [str(each) for each in requirements if each.name in family] == asked
    assert {each.name for each in requirements} - set(family) == ({"flax"} if "flax" in changes else set())


def test_the_first_cell_says_what_to_set_where_there_is_no_checkout(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="set REPOSITORY"):
        installed_pips(monkeypatch, everything(), repository=str(tmp_path))


class Kernel:
    """A kernel whose messages are kept."""

    def __init__(self, environment, folder):
        self.manager, self.client = jupyter_client.manager.start_new_kernel(env=environment, cwd=str(folder))

    def start(self, code):
        return self.client.execute(textwrap.dedent(code))

    def messages(self, request, seconds=120):
        """(type, content) of what the request shows, until it is done."""
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=seconds)
            except queue.Empty:
                raise AssertionError(f"the kernel said nothing for {seconds} s") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            yield message["msg_type"], message["content"]

    def shown(self, code):
        """The text that a cell prints. Fails where the cell does."""
        found = list(self.messages(self.start(code)))
        errors = ["\n".join(content["traceback"]) for kind, content in found if kind == "error"]
        assert not errors, errors[0]
        return "".join(content["text"] for kind, content in found if kind == "stream")

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(environment, tmp_path_factory):
    found = Kernel(environment, tmp_path_factory.mktemp("kernel"))
    found.shown("import jaxtrain, tiny\nconfig = tiny.config(total='100000st', eval_every='', terminal='auto')")
    yield found
    found.close()


@pytest.mark.slow
def test_stop_returns_the_result_so_far_and_curves_are_drawn_meanwhile(kernel):
    request = kernel.start("result = jaxtrain.train.run(config, data=tiny.data())")
    handles, text_before, images, stopped = [], "", 0, False
    for kind, content in kernel.messages(request):
        assert kind != "error", content["traceback"]
        if kind == "display_data":
            handles.append(content["transient"]["display_id"])
            assert "step " not in text_before.splitlines()[-1]  # the curves stand above the lines of the run
        elif kind == "stream":
            text_before += content["text"]
        elif kind == "update_display_data":
            assert content["transient"]["display_id"] == handles[0]
            images += "image/png" in content["data"]
            if images == 2 and not stopped:
                stopped = True
                for _ in range(2):  # people click twice
                    kernel.manager.interrupt_kernel()
    assert len(handles) == 1 and images >= 2 and "stopped at step" in text_before
    step = int(kernel.shown("print(int(result.state.step), result.exit_code, len(result.history) > 0)").split()[0])
    assert 0 < step < 100000
    shown = kernel.shown(
        f"""
        config.total, config.terminal = "{step + 7}st", "quiet"
        print(int(jaxtrain.train.run(config, state=result.state, data=tiny.data()).state.step))
        """
    )
    assert int(shown) == step + 7


@pytest.mark.slow
def test_a_mistake_is_one_line_in_a_notebook(kernel):
    request = kernel.start("jaxtrain.load_config('configs/digits.py', batchsize=3)")
    lines = [content["traceback"] for kind, content in kernel.messages(request) if kind == "error"]
    assert len(lines[0]) == 1 and "Did you mean 'config.batch_size'?" in lines[0][0]


def test_a_second_stop_ends_the_cell_and_two_clicks_are_one(monkeypatch):
    """Outside of notebooks it ends the process: tests/test_stopping.py."""
    monkeypatch.setattr(stopping, "in_notebook", lambda: True)
    clock = iter([10.0, 10.3, 12.0])
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock))
    with stopping.Stopper() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 130
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_in_another_thread_is_the_same_run():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        there = pool.submit(train.run, tiny.config(total="6st"), data=tiny.data()).result(timeout=120)
    here = train.run(tiny.config(total="6st"), data=tiny.data())
    for a, b in zip(jax.tree.leaves(there.params), jax.tree.leaves(here.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert there.exit_code == 0


def test_a_result_shows_itself_in_a_line():
    result = train.run(tiny.config(total="3st"), data=tiny.data())
    assert repr(result).startswith("Result(step 3 of 3, eval/accuracy 0.") and len(repr(result)) < 200
    assert repr(result.job) == "Job(tiny, 3 steps of 16 examples)"


@pytest.mark.slow
def test_load_needs_neither_the_data_nor_its_size(environment, tmp_path):
    """In a fresh process, of a run whose warm-up is longer than a run on any stand-in would be."""
    config = tiny.config(
        data=dict(name="tfds", dataset="cifar10", dir=str(tmp_path / "gone")),
        total="1ep",
        schedule=dict(name="cosine", warmup="70st"),
        eval_every="",
    )
    data = tiny.data(train=1280)
    result = train.run(config, tmp_path / "run", data=data)
    pictures = data.open()["test"].get(np.arange(5))["image"]
    np.save(tmp_path / "pictures.npy", pictures)
    code = f"""
        import json, sys, jaxtrain, numpy as np
        found = jaxtrain.load({str(tmp_path / "run")!r})
        seen = found.predict(np.load({str(tmp_path / "pictures.npy")!r}))["probabilities"]
        assert "tensorflow" not in sys.modules
        print(json.dumps([repr(found), list(found.params), found.config.batch_size, seen.tolist()]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown, params, batch_size, seen = json.loads(done.stdout)
    assert (shown, params, batch_size) == ("Trained(step 80)", list(result.params), 16)
    np.testing.assert_allclose(seen, result.predict(pictures)["probabilities"], rtol=1e-5)


def test_a_result_from_memory_is_kept_in_a_workdir(tmp_path):
    result = train.run(tiny.config(), data=tiny.data())
    kept = train.run(tiny.config(), tmp_path, state=result.state, data=tiny.data())
    loaded = jaxtrain.load(tmp_path)
    pictures = tiny.data().open()["test"].get(np.arange(9))["image"]
    for found in (kept, loaded):
        np.testing.assert_allclose(
            found.predict(pictures)["probabilities"], result.predict(pictures)["probabilities"], rtol=1e-5
        )
    with pytest.raises(UserError, match="a state was given too"):
        train.run(tiny.config(), tmp_path, state=result.state, data=tiny.data())


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        (dict(batch_size=32, model=dict(width=8)), ()),
        ({}, {"batch_size": 32, "model.width": 8}),
        (dict(batch_size=32), {"model": dict(width=8)}),
        ({}, ["batch_size=32", "model.width=8"]),
    ],
)
def test_load_config_takes_keywords_mappings_and_texts(changes, more):
    config = jaxtrain.load_config("configs/digits.py:smoke", more, **changes)
    assert (config.batch_size, config.model.width, config.model.name) == (32, 8, "cnn")
