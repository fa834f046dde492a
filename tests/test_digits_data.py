"""The digits: read without scikit-learn, and cut the same way for ever."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain.data import digits as digits_module
from jaxtrain.data.digits import digits
from jaxtrain.errors import UserError


def labels_of(source) -> np.ndarray:
    return source.get(np.arange(len(source)))["label"]


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    expected = load_digits()
    source = digits(validation=0, test=0).open()["train"]
    batch = source.get(np.arange(1797))
    assert np.array_equal(batch["image"][..., 0], np.round(expected.images * 255 / 16).astype(np.uint8))
    assert np.array_equal(batch["label"], expected.target)


def test_the_spec_and_sizes_are_known_before_the_data_is_read():
    dataset = digits()
    sources = dataset.open()
    assert dataset.num_classes == 10 and len(dataset.class_names) == 10
    assert dict(dataset.sizes) == {role: len(source) for role, source in sources.items()}
    for source in sources.values():
        batch = source.get(np.array([3, 0, 3]))
        assert source.spec == dataset.spec
        for key, field in dataset.spec.items():
            assert batch[key].shape == (3, *field.shape) and batch[key].dtype == field.dtype
            assert np.array_equal(batch[key][0], batch[key][2])


def test_the_cut_never_changes():
    roles = digits().open()
    assert [len(roles[role]) for role in ("train", "validation", "test")] == [1258, 180, 359]
    checksum = hashlib.sha256(roles["test"].ids.astype("<i4").tobytes()).hexdigest()
    assert checksum[:16] == "1c8340164e58950b"


def test_roles_are_disjoint_stratified_and_test_does_not_move():
    """Report 15: no example of validation is ever trained on; what is whose does not depend on the run or its seed."""
    roles = digits().open()
    ids = np.concatenate([source.ids for source in roles.values()])
    assert sorted(ids) == list(range(1797))
    whole = np.bincount(labels_of(digits(validation=0, test=0).open()["train"]))
    for source in roles.values():
        share = whole * len(source) / 1797
        assert np.abs(np.bincount(labels_of(source)) - share).max() < 2
    assert np.array_equal(digits(validation=0.3).open()["test"].ids, roles["test"].ids)


@pytest.mark.parametrize("options, roles", (({"validation": 0}, "train test"), ({"test": 0.0}, "train validation")))
def test_a_share_of_nothing_is_no_role(options, roles):
    assert " ".join(digits(**options).open()) == roles


@pytest.mark.parametrize(
    "options", ({"test": 1.0}, {"validation": -0.1}, {"test": 0.0001}, {"test": 0.6, "validation": 0.4})
)
def test_shares_that_leave_nothing_are_refused_before_reading(options):
    with pytest.raises(UserError, match="validation|test"):
        digits(**options)


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from jaxtrain.data.digits import digits; digits().open(); "
        "heavy = {'sklearn', 'tensorflow', 'tensorflow_datasets', 'scipy.stats', 'pandas'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_machine_without_scikit_learn_is_told_so(monkeypatch):
    monkeypatch.setattr(digits_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install scikit-learn") as caught:
        digits()
    assert "\n" not in str(caught.value)
