"""Pictures in folders, one folder a class: the form in which people have them. Sizes differ, what is served not."""

import math
import os
from pathlib import Path

import jax
import numpy as np

from jaxtrain.data import roles
from jaxtrain.data.damage import Damage
from jaxtrain.data.pictures import converted, opened
from jaxtrain.data.sources import Batch, DataAbsent, Dataset, Source, Spec
from jaxtrain.errors import UserError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
LITTER = {"thumbs.db", "desktop.ini"}  # left by file managers, as hidden files are
NOMINAL_CLASSES = 10  # of the synthetic stand-in for a folder that is not there
CENTRE = 0.875  # of the shorter side, which evaluation looks at: 224 of 256 pixels, as is usual
RATIOS = (math.log(3 / 4), math.log(4 / 3))  # of width to height of a random crop, uniform in the logarithm


def folder(
    *,
    dir: str = "",
    size: int = 224,
    smallest_crop: float = 0.08,
    validation: float = 0.1,
    test: float = 0.2,
    max_corrupt: int = 0,
) -> Dataset:
    """Pictures of DIR/class/picture.jpg, or DIR/train/class/picture.jpg with validation (val) and test beside train.

    {"image": uint8 [size, size, 3], "label": int32 []}; classes are the folders' names, sorted. Training sees a random
    part of a picture, of at least the share `smallest_crop` of its area (1: as evaluation does), another one in each
    epoch: Szegedy et al., "Going deeper with convolutions", 2014. Evaluation sees the middle. A missing split is the
    given share of train, cut by class once for ever (0: no such role). Up to `max_corrupt` damaged pictures are left
    out, each named (0: the first ends the run), see `data.damage`.

    Raises UserError for a folder without classes or pictures, and for files in it that are none; `open()` raises
    DataAbsent where there is no folder.
    """
    if size < 1 or not 0 < smallest_crop <= 1 or max_corrupt < 0:
        raise UserError(
            f"data folder: size={size}, smallest_crop={smallest_crop}, max_corrupt={max_corrupt}; expected 1 or more, "
            "a share above 0 up to 1, 0 or more"
        )
    root = Path(dir).expanduser()
    there = bool(dir) and root.is_dir()
    splits = _splits(root) if there else {}
    names = _class_names(splits["train"]) if there else ()
    spec = {"image": jax.ShapeDtypeStruct((size, size, 3), np.uint8), "label": jax.ShapeDtypeStruct((), np.int32)}

    def open_folder() -> dict[str, Source]:
        if not there:
            raise DataAbsent(f"config.data.dir is {dir!r}, and there is no such folder; give one of pictures by class")
        files = {role: _files(where, names) for role, where in splits.items()}
        paths, labels = files["train"]
        shares = {"validation": validation, "test": test}
        ids = roles.split(
            labels, len(paths), **{role: 0.0 if role in files else share for role, share in shares.items()}
        )
        files |= {role: (paths[of_role], labels[of_role]) for role, of_role in ids.items()}
        borne = Damage(max_corrupt)
        return {role: Pictures(*found, spec, smallest_crop, borne) for role, found in files.items()}

    return Dataset(
        name=root.name or "folder",
        spec=spec,
        num_classes=len(names) or NOMINAL_CLASSES,
        class_names=names,
        open=open_folder,
        present=lambda: there,
    )


class Pictures:
    """The pictures of one role: a VaryingSource. `paths` bytes [N], `labels` int32 [N].

    With a seed, pictures are cropped at random, as a function of seed, example and epoch; else it is their middle.
    """

    def __init__(
        self,
        paths: np.ndarray,
        labels: np.ndarray,
        spec: Spec,
        smallest_crop: float,
        damage: Damage,
        seed: int | None = None,
    ):
        self.spec, self.damage = spec, damage
        self._paths, self._labels, self._smallest, self._seed = paths, labels, smallest_crop, seed

    def __len__(self) -> int:
        return len(self._paths)

    def varied(self, seed: int) -> "Pictures":
        """The same for training; example `id` of epoch e is number e · N + id."""
        drawn = seed if self._smallest < 1 else None
        return Pictures(self._paths, self._labels, self.spec, self._smallest, self.damage, drawn)

    def get(self, ids: np.ndarray) -> Batch:
        image = np.stack([self._picture(int(number)) for number in ids])  # [B, size, size, 3]
        return {"image": image, "label": self._labels[ids % len(self)]}

    def describe(self, number: int) -> str:
        return f"the picture {os.fsdecode(self._paths[number % len(self)])}"

    def _picture(self, number: int) -> np.ndarray:
        epoch, example = divmod(number, len(self))
        random = None if self._seed is None else np.random.default_rng((self._seed, epoch, example))
        encoded = Path(os.fsdecode(self._paths[example])).read_bytes()
        return cropped(encoded, self.spec["image"].shape[0], random, self._smallest)


def cropped(encoded: bytes, size: int, random: np.random.Generator | None = None, smallest: float = 1.0) -> np.ndarray:
    """A part of an encoded picture, upright, as uint8 [size, size, 3]: the middle, or one that `random` chooses.

    Raises ValueError for what is no picture of eight bits, and whatever Pillow raises for a damaged one.
    """
    from PIL import Image, ImageOps

    with opened(encoded) as picture:
        ImageOps.exif_transpose(picture, in_place=True)  # cameras say in a tag how they were held
        width, height = picture.size
        box = _centre(width, height) if random is None else _random(width, height, random, smallest)
        part = converted(picture, 3).resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(part)


def _centre(width: int, height: int) -> tuple[float, float, float, float]:
    side = CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random(width: int, height: int, random: np.random.Generator, smallest: float) -> tuple[float, ...]:
    """Ten tries for a part that lies within the picture, else the middle: only long, thin pictures need it."""
    for _ in range(10):
        area = width * height * (smallest + (1 - smallest) * random.random())
        ratio = math.exp(RATIOS[0] + (RATIOS[1] - RATIOS[0]) * random.random())
        wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
        left, top = (width - wide) * random.random(), (height - high) * random.random()
        if wide <= width and high <= height:
            return left, top, left + wide, top + high
    return _centre(width, height)


def _splits(root: Path) -> dict[str, Path]:
    """Role → folder of classes."""
    inner = _folders(root)
    if not (root / "train").is_dir() or not _folders(root / "train"):  # a class may be called train, too
        return {"train": root}
    unknown = [each.name for each in inner if each.name not in SPLITS]
    roles_of = [SPLITS[each.name] for each in inner if each.name in SPLITS]
    if unknown or len(set(roles_of)) < len(roles_of):
        raise UserError(
            f"{root} holds the folders {', '.join(each.name for each in inner)}; beside train, expected at most one "
            "validation (or val, valid) and one test"
        )
    return dict(zip(roles_of, inner, strict=True))


def _class_names(where: Path) -> tuple[str, ...]:
    names = tuple(each.name for each in _folders(where))
    if len(names) < 2:
        raise UserError(f"{where} holds {len(names)} folders; expected two or more, one a class, with its pictures")
    return names


def _files(where: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Paths (bytes [N]) and labels (int32 [N]), in the order of the names."""
    if unknown := [each.name for each in _folders(where) if each.name not in names]:
        raise UserError(f"{where} holds a class {unknown[0]!r}, which train has not; it has {', '.join(names)}")
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = pictures_in(where / name) if (where / name).is_dir() else []
        paths += [os.fsencode(path) for path in found]
        labels += [label] * len(found)
    if not paths:
        raise UserError(f"{where} holds no pictures; expected {where}/class/picture.jpg")
    return np.array(paths), np.array(labels, np.int32)


def pictures_in(where: Path, *, folders: bool = False) -> list[Path]:
    """The pictures of a folder, by name. Raises UserError for anything else in it (but `folders`), and for none."""
    files = [path for path in sorted(where.iterdir()) if not _is_litter(path) and not (folders and path.is_dir())]
    if wrong := [path for path in files if path.suffix.lower() not in SUFFIXES or path.is_dir()]:
        raise UserError(f"{wrong[0]} is no picture by its name (expected {', '.join(SUFFIXES)}); take it out of there")
    if not files:
        raise UserError(f"{where} holds no pictures")
    return files


def _folders(where: Path) -> list[Path]:
    return [path for path in sorted(where.iterdir()) if path.is_dir() and not _is_litter(path)]


def _is_litter(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in LITTER
