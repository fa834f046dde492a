"""`python -m jaxtrain.predict`: every kind of input to the same table; mistakes cost one line."""

import csv
import io

import numpy as np
import pytest
import tiny
from PIL import Image

from jaxtrain import predict, train
from jaxtrain.data.sources import from_arrays
from jaxtrain.result import load

IMAGES = np.random.default_rng(0).integers(0, 256, (21, 8, 8, 1), dtype=np.uint8)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The workdir of a run on 8×8 pictures of ten classes."""
    folder = tmp_path_factory.mktemp("run")
    train.run(tiny.config(total="2st", test="no", eval_every="", devices=1), folder, data=tiny.data())
    return folder


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def as_npy(folder):
    np.save(folder / "in.npy", IMAGES)
    return folder / "in.npy", [str(row) for row in range(21)]


def as_npz(folder):
    np.savez(folder / "in.npz", image=IMAGES, note=np.arange(3))
    return folder / "in.npz", [str(row) for row in range(21)]


def as_pictures(folder):
    names = [f"{'b' if row < 9 else 'a'}/{row:02}.png" for row in range(21)]
    for name, image in zip(names, IMAGES, strict=True):
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / "in" / name)
    return folder / "in", names


@pytest.mark.parametrize("give", [as_npy, as_npz, as_pictures])
def test_every_row_once_with_class_and_probabilities(give, digits, tmp_path):
    path, names = give(tmp_path)
    output = tmp_path / "out.csv"
    assert predict.main([f"--workdir={digits}", f"--input={path}", f"--output={output}"]) == 0
    rows = {row["input"]: row for row in table(output.read_text())}
    assert list(rows) == sorted(names, key=lambda name: (name[0] if "/" in name else "", names.index(name)))
    expected = load(digits).predict(IMAGES)
    for number, name in enumerate(names):
        assert rows[name]["class"] == rows[name]["label"] == str(expected["label"][number])
        found = [np.float32(rows[name][f"probabilities_{k}"]) for k in range(10)]
        np.testing.assert_allclose(found, expected["probabilities"][number], rtol=1e-6)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_a_table_of_numbers(tmp_path, capsys):
    values = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = from_arrays({"image": values, "label": np.arange(40) % 2}, class_names=("no", "yes"))
    train.run(tiny.config(total="2st", test="no", eval_every="", devices=1), tmp_path / "run", data=data)
    lines = [f"{a},{k % 2},{b},{c}" for k, (a, b, c) in enumerate(values)]
    (tmp_path / "in.csv").write_text("\n".join(["height,label,width,depth", *lines]) + "\n")
    capsys.readouterr()
    assert predict.main([f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'in.csv'}"]) == 0
    rows = table(capsys.readouterr().out)
    expected = load(tmp_path / "run").predict(values)
    assert [row["class"] for row in rows] == [("no", "yes")[label] for label in expected["label"]]
    np.testing.assert_allclose([float(row["probabilities_yes"]) for row in rows], expected["probabilities"][:, 1], 1e-6)
    (tmp_path / "in.csv").write_text("a,b,c\n1,2,3\n1,two,3\n")
    assert predict.main([f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'in.csv'}"]) == 2
    assert "line 3: could not convert string to float: 'two'" in capsys.readouterr().err


def test_what_other_tasks_predict_are_columns_or_cells():
    found = predict.columns(
        {
            "value": np.array([0.1, 2.0], np.float32),
            "offset": np.array([[1, 2, 3], [4, 5, 6]]),
            "label": np.array([[[1, 0], [0, 0]], [[0, 1], [1, 1]]]),
        },
        ("cat", "dog"),
    )
    assert found == {
        "value": ["0.100000001", "2"],
        "offset_0": ["1", "4"],
        "offset_1": ["2", "5"],
        "offset_2": ["3", "6"],
        "label[2x2]": ["1 0 0 0", "0 1 1 1"],
    }


class Pickled:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def mistakes(folder):
    """What to leave in the folder as input, and what the line about it says."""
    (folder / "bad").mkdir()
    (folder / "bad" / "a.png").write_bytes(b"not a picture")
    (folder / "large").mkdir()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "large" / "a.png")
    (folder / "empty").mkdir()
    np.save(folder / "wide.npy", np.zeros((2, 9, 9, 1), np.uint8))
    np.save(folder / "pickle.npy", np.array([Pickled()], object))
    np.savez(folder / "none.npz", other=np.zeros(3))
    np.savez(folder / "pickle.npz", image=np.array([Pickled()], object))
    (folder / "broken.npy").write_bytes(b"\x93NUMPY")
    (folder / "a.xyz").write_text("")
    (folder / "a.csv").write_text("a\n1\n")
    return {
        "nowhere": ["not there"],
        "bad": ["bad/a.png", "no picture of a known kind"],
        "large": ["large/a.png", "9x9", "8x8"],
        "empty": ["holds no pictures"],
        "wide.npy": ["expected [N, 8, 8, 1]"],
        "pickle.npy": ["cannot be read as arrays of numbers", "objects"],
        "pickle.npz": ["allow_pickle"],
        "none.npz": ["none that it learnt from"],
        "broken.npy": ["cannot be read"],
        "a.xyz": ["no known kind", ".npy"],
        "a.csv": ["learnt from image uint8[8, 8, 1]"],
    }


def test_mistakes_are_one_line_and_leave_no_table(digits, tmp_path, capsys):
    output = tmp_path / "out.csv"
    for name, words in mistakes(tmp_path).items():
        assert predict.main([f"--workdir={digits}", f"--input={tmp_path / name}", f"--output={output}"]) == 2, name
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("jaxtrain:")]
        assert all(word in line for word in words), line
        assert not output.exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--input=x"], 2, "no workdir given"),
        (["--workdir=x"], 2, "no input given"),
        (["--workdir=nowhere", "--input=x"], 2, "is not a workdir"),
        (["--workdir=RUN", "--input=x", "--ouput=y"], 2, "Did you mean '--output'"),
        (["--workdir=RUN", "--input=IN", "--output=/nowhere/out.csv"], 5, "cannot write /nowhere/out.csv"),
    ],
    ids=["no workdir", "no input", "no run", "misspelt", "unwritable"],
)
def test_flags(argv, code, words, digits, tmp_path, capsys):
    path, _ = as_npy(tmp_path)
    argv = [each.replace("RUN", str(digits)).replace("=IN", f"={path}") for each in argv]
    assert predict.main(argv) == code
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_of_any_size_where_the_run_was_on_a_folder(tmp_path, capsys):
    for number in range(8):
        for name in ("cat", "dog"):
            (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
            pixels = np.full((9 + number, 12, 3), 200 if name == "cat" else 20, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / name / f"{number}.png")
    data = dict(name="folder", dir=str(tmp_path / "set"), size=8)
    config = tiny.config(data=data, total="2st", batch_size=4, test="no", eval_every="", devices=1)
    train.run(config, tmp_path / "run")
    capsys.readouterr()
    assert predict.main([f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'set' / 'cat' / '3.png'}"]) == 0
    (row,) = table(capsys.readouterr().out)
    assert row["input"] == "3.png" and row["class"] in ("cat", "dog")


@pytest.mark.slow
def test_texts_by_line_or_column(tmp_path, capsys):
    rows = [f"{'good day' if k % 2 else 'bad night'} {k},{'up' if k % 2 else 'down'}" for k in range(40)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    data = dict(name="csv", file="train.csv", dir=str(tmp_path), length=16)
    model = dict(name="encoder", width=16, depth=1, heads=2)
    config = tiny.config(data=data, model=model, task="sequence_classification", total="2st", test="no", devices=1)
    train.run(config, tmp_path / "run")
    (tmp_path / "in.txt").write_text("good day 77\n\nbad night\n")
    capsys.readouterr()
    assert predict.main([f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'in.txt'}"]) == 0
    lines = table(capsys.readouterr().out)
    assert [row["input"] for row in lines] == ["0", "1", "2"] and {row["class"] for row in lines} <= {"up", "down"}
    (tmp_path / "in.csv").write_text("id,text\n1,good day 77\n2,\n3,bad night\n")
    assert predict.main([f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'in.csv'}"]) == 0
    assert table(capsys.readouterr().out) == lines
    (tmp_path / "in.txt").write_bytes(b"gr\xfcn\n")
    assert predict.main([f"--workdir={tmp_path / 'run'}", f"--input={tmp_path / 'in.txt'}"]) == 2
    assert "no text in UTF-8" in capsys.readouterr().err
