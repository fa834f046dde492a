"""Scikit-learn's hand-written digits, read from its file: neither scikit-learn nor TensorFlow is imported."""

import gzip
import importlib.util
import pathlib

import jax
import numpy as np

from jaxtrain.data import roles
from jaxtrain.data.sources import ArraySource, Dataset, Source, cut_source
from jaxtrain.errors import UserError

SIZE = 1797


def digits(*, validation: float = 0.1, test: float = 0.2) -> Dataset:
    """1,797 digits of 8x8 grey pixels: {"image": uint8 [8, 8, 1], "label": int32 []}, ten classes.

    Pixels count the set dots of a 4x4 block, 0..16; they are stored as round(value * 255 / 16). The file is
    scikit-learn's copy of the test set of Alpaydin and Kaynak, "Optical recognition of handwritten digits",
    UCI (1998). `validation` and `test` are shares of the whole, cut by class once for ever. Raises UserError
    where scikit-learn is not installed.
    """
    path = _path()

    def open_digits() -> dict[str, Source]:
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int32)  # [N, 64 pixels + label]
        images = (table[:, :64] * 255 + 8) // 16  # rounded
        source = ArraySource({"image": images.astype(np.uint8).reshape(-1, 8, 8), "label": table[:, 64]})
        return cut_source(source, table[:, 64], validation=validation, test=test)

    return Dataset(
        name="digits",
        spec={
            "image": jax.ShapeDtypeStruct((8, 8, 1), np.uint8),
            "label": jax.ShapeDtypeStruct((), np.int32),
        },
        num_classes=10,
        class_names=tuple("0123456789"),
        open=open_digits,
        sizes=roles.sizes(SIZE, validation=validation, test=test),
    )


def _path() -> pathlib.Path:
    package = importlib.util.find_spec("sklearn")
    folder = pathlib.Path((package and package.origin) or "").parent
    path = folder / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise UserError("data 'digits' needs scikit-learn's file of it, not found: pip install scikit-learn")
    return path
