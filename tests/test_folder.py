"""A folder of pictures as a data set: classes, splits, sizes, crops, and what lies in folders besides."""

import pathlib

import numpy as np
import pytest
import tiny
from PIL import Image

from jaxtrain import train
from jaxtrain.data.folder import folder
from jaxtrain.data.sources import DataAbsent, VaryingSource
from jaxtrain.errors import UserError


def picture(path, size=(20, 12), colour=(200, 100, 50), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    gradient = np.linspace(0, 1, size[0] * size[1])[:, None] * np.array(colour)[None]
    Image.fromarray(gradient.reshape(size[1], size[0], 3).astype(np.uint8)).save(path, **options)


@pytest.fixture
def pets(tmp_path):
    """Twelve cats and twelve dogs of various sizes and formats, with what systems leave behind."""
    for number in range(12):
        suffix = ("jpg", "png", "JPEG")[number % 3]
        picture(tmp_path / "cat" / f"{number:02}.{suffix}", (16 + number, 12), (250, 50, 0))
        picture(tmp_path / "dog" / f"{number:02}.{suffix}", (12, 16 + number), (0, 50, 250))
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "dog" / "Thumbs.db").write_bytes(b"x")
    return tmp_path


def test_classes_roles_and_shapes(pets):
    dataset = folder(dir=str(pets), size=8, validation=0.25, test=0.25)
    assert (dataset.class_names, dataset.num_classes) == (("cat", "dog"), 2)
    opened = dataset.open()
    assert {role: len(source) for role, source in opened.items()} == {"train": 12, "validation": 6, "test": 6}
    for source in opened.values():
        batch = source.get(np.arange(len(source)))
        assert batch["image"].shape == (len(source), 8, 8, 3) and batch["image"].dtype == np.uint8
        assert np.bincount(batch["label"]).tolist() == [len(source) // 2] * 2
        redder = batch["image"][..., 0].mean((1, 2)) > batch["image"][..., 2].mean((1, 2))
        assert (redder == (batch["label"] == 0)).all()


def test_own_splits_are_kept_whatever_validation_is_called(pets, tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    for role in ("train", "val"):
        for name in ("cat", "dog"):
            (root / role).mkdir(exist_ok=True)
            (root / role / name).symlink_to(pets / name)
    opened = folder(dir=str(root), size=8, test=0.5).open()
    assert {role: len(source) for role, source in opened.items()} == {"train": 12, "validation": 24, "test": 12}


def test_crops_are_a_function_of_seed_example_and_epoch(pets):
    source = folder(dir=str(pets), size=8).open()["train"]
    assert isinstance(source, VaryingSource)
    size, ids = len(source), np.arange(len(source))
    drawn = {
        (seed, epoch): source.varied(seed).get(ids + epoch * size)["image"] for seed in (0, 1) for epoch in (0, 1, 7)
    }
    again = source.varied(0).get((ids + 7 * size)[::-1])["image"][::-1]
    assert (again == drawn[0, 7]).all()
    assert all((drawn[a] != drawn[b]).any((1, 2, 3)).mean() > 0.9 for a in drawn for b in drawn if a != b)
    assert (source.get(ids)["image"] == source.get(ids)["image"]).all()
    still = folder(dir=str(pets), size=8, smallest_crop=1.0).open()["train"]
    assert (still.varied(0).get(ids + 5 * size)["image"] == source.get(ids)["image"]).all()


def test_evaluation_sees_the_middle_upright(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255
    turned = Image.Exif()
    turned[0x0112] = 3  # held upside down
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "plain.png")
    Image.fromarray(pixels).save(tmp_path / "a" / "turned.png", exif=turned)
    picture(tmp_path / "b" / "other.png")
    source = folder(dir=str(tmp_path), size=4, validation=0, test=0).open()["train"]
    images = dict(zip(["plain", "turned"], source.get(np.arange(2))["image"][..., 0], strict=True))
    assert (images["plain"][:, :2] > 200).all() and (images["plain"][:, 2:] < 50).all()
    assert (images["turned"] == images["plain"][:, ::-1]).all()


REST = ("text", "truncated", "deep")


def config(where, **data):
    options = dict(name="folder", dir=str(where), size=8, validation=0.25, test=0.25) | data
    return tiny.config(data=options, total="12st", batch_size=8, devices=1, report_every="6st", eval_every="6st")


@pytest.mark.slow
def test_trains_and_resumes_to_the_bit(pets, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    through = train.run(config(pets))
    stopped = config(pets)
    stopped.total = "5st"
    train.run(stopped, work)
    assert tiny.same(through.state, train.run(config(pets), work).state)
    assert through.predict(np.zeros((3, 8, 8, 3), np.uint8))["label"].shape == (3,)


@pytest.mark.parametrize("bad", ["zero", *(pytest.param(each, marks=pytest.mark.slow) for each in REST)])
def test_a_damaged_picture_is_named_or_left_out(bad, pets):
    """Report 43: zero bytes, another thing under the name of a picture, half a picture, 16 bits."""
    where = pets / "cat" / "00.jpg"
    content = {"zero": b"", "text": b"no picture\n", "truncated": where.read_bytes()[:300]}
    if bad == "deep":
        Image.fromarray(np.zeros((9, 9), np.uint16)).save(where, format="PNG")
    else:
        where.write_bytes(content[bad])
    whole = dict(validation=0, test=0)
    with pytest.raises(UserError, match=r"cat/00\.jpg cannot be decoded.*max_corrupt") as error:
        train.run(config(pets, **whole))
    assert "\n" not in str(error.value)
    result = train.run(config(pets, **whole, max_corrupt=1))
    assert sum(line["train/corrupt"] for line in result.history if "train/corrupt" in line) == 4  # one an epoch


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda root: (root / "cat" / "notes.txt").write_text("x"), ["notes.txt", "no picture by its name"]),
        (lambda root: (root / "bird").mkdir(), ["bird holds no pictures"]),
        (lambda root: [path.unlink() for path in (root / "dog").iterdir()], ["dog holds no pictures"]),
        (lambda root: picture(root / "train" / "cat" / "a.png"), ["cat, dog, train", "beside train"]),
    ],
    ids=["another file", "empty class", "emptied class", "mixed layout"],
)
def test_what_is_not_of_the_form_is_refused_in_one_line(mistake, words, pets):
    mistake(pets)
    with pytest.raises(UserError) as error:
        folder(dir=str(pets), size=8).open()
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_class_that_training_lacks_and_a_single_class_are_refused(tmp_path):
    for path in ("train/cat/a.png", "train/dog/a.png", "test/bird/a.png", "one/cat/a.png"):
        picture(tmp_path / "set" / path if "one" not in path else tmp_path / path)
    with pytest.raises(UserError, match="bird.*train has not"):
        folder(dir=str(tmp_path / "set")).open()
    with pytest.raises(UserError, match="holds 1 folders; expected two or more"):
        folder(dir=str(tmp_path / "one"))


@pytest.mark.parametrize("where", ["", "nowhere"])
def test_a_folder_that_is_not_there(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = folder(dir=where, size=8)
    assert not dataset.present() and dataset.spec["image"].shape == (8, 8, 3)
    with pytest.raises(DataAbsent, match="config.data.dir"):
        dataset.open()


def test_the_formats_that_people_have(tmp_path):
    """Alpha, palettes, animations, CMYK, grey: as three channels of eight bits."""
    rgb = Image.fromarray(np.full((9, 9, 3), (10, 200, 90), np.uint8))
    for mode in ("RGBA", "P", "L", "1", "LA"):
        (tmp_path / "a").mkdir(exist_ok=True)
        rgb.convert(mode).save(tmp_path / "a" / f"{mode}.png")
    rgb.convert("CMYK").save(tmp_path / "a" / "cmyk.jpg")
    rgb.save(tmp_path / "a" / "moving.gif", save_all=True, append_images=[rgb.rotate(90)])
    picture(tmp_path / "b" / "grün_蛙.webp", (1, 1))
    source = folder(dir=str(tmp_path), size=4, validation=0, test=0).open()["train"]
    assert source.get(np.arange(8))["image"].shape == (8, 4, 4, 3)
    assert pathlib.Path(source.describe(7).removeprefix("the picture ")).name == "grün_蛙.webp"
