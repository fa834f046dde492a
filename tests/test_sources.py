"""Sources: random access by id, checked arrays, the cut into roles, synthetic stand-ins."""

import jax
import numpy as np
import pytest

from jaxtrain.data import roles, sources
from jaxtrain.data.sources import ArraySource, Subset, SyntheticSource, from_arrays, synthetic
from jaxtrain.errors import UserError

UINT8 = np.arange(5 * 4 * 4, dtype=np.uint8).reshape(5, 4, 4)


@pytest.mark.parametrize(
    "arrays, shape, dtype",
    (
        ({"image": UINT8}, (4, 4, 1), np.uint8),
        ({"image": UINT8[..., None]}, (4, 4, 1), np.uint8),
        ({"image": UINT8 / 255}, (4, 4, 1), np.float32),
        ({"image": (UINT8 / 255).astype(np.float16)}, (4, 4, 1), np.float16),
        ({"image": UINT8.reshape(5, 16) / 255}, (16,), np.float32),
        ({"label": np.arange(5)}, (), np.int32),
        ({"label": np.arange(5, dtype=np.uint8)}, (), np.int32),
        ({"label": [3, 1, 4, 1, 5]}, (), np.int32),
        ({"target": np.linspace(0, 1, 5)}, (), np.float32),
        ({"tokens": np.arange(10, dtype=np.uint64).reshape(5, 2)}, (2,), np.int32),
        ({"flag": np.arange(5) > 2}, (), np.bool_),
        ({"image": jax.numpy.zeros((5, 4, 4))}, (4, 4, 1), np.float32),
    ),
)
def test_arrays_are_served_in_the_dtypes_of_the_device(arrays, shape, dtype):
    source = ArraySource(arrays)
    ((key, array),) = arrays.items()
    batch = source.get(np.array([4, 0, 4]))
    assert source.spec == {key: jax.ShapeDtypeStruct(shape, dtype)} and len(source) == 5
    assert batch[key].shape == (3, *shape) and batch[key].dtype == dtype
    assert np.allclose(batch[key].ravel(), np.asarray(array)[[4, 0, 4]].ravel())


def test_a_batch_is_a_new_array():
    source = ArraySource({"image": UINT8.copy()})
    source.get(np.array([0]))["image"][:] = 7
    assert source.get(np.array([0]))["image"].max() == 15


def test_a_memory_map_is_not_read_as_a_whole(tmp_path):
    stored = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (1000, 3))
    stored[7] = (1, 2, 3)
    source = ArraySource({"features": stored})
    assert isinstance(source.column("features"), np.memmap)
    assert source.get(np.array([7]))["features"].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    "arrays, message",
    (
        ({}, "no arrays"),
        ({"image": UINT8, "label": np.arange(4)}, "image: 5, label: 4"),
        ({"image": UINT8[:0]}, "image: 0"),
        ({"label": np.arange(5.0)}, r"float64.*integers.*astype"),
        ({"label": np.array(["a"] * 5)}, "<U1"),
        ({"image": UINT8.astype(np.int64)}, r"int64.*uint8"),
        ({"label": np.array([0, 2**31])}, "2147483648"),
        ({"label": np.float32(3)}, r"\[\]"),
        ({"x": np.zeros(3, complex)}, "complex"),
        ({"x": [[1, 2], [3, 4]], "y": ["cat", "dog"]}, "<U3"),
    ),
)
def test_arrays_that_cannot_be_learnt_from_are_refused_in_one_line(arrays, message):
    with pytest.raises(UserError, match=message) as caught:
        ArraySource(arrays)
    assert "\n" not in str(caught.value)


def test_a_subset_renumbers():
    part = sources.subset(ArraySource({"label": np.arange(10) * 10}), np.array([7, 2, 5]))
    assert type(part) is Subset and len(part) == 3
    assert part.get(np.array([2, 0]))["label"].tolist() == [50, 70]
    nested = sources.subset(part, np.array([1]))
    assert nested.get(np.array([0]))["label"].tolist() == [20]


@pytest.mark.parametrize("size", (10, 37, 1000))
@pytest.mark.parametrize("validation, test", ((0.1, 0.2), (0.0, 0.2), (0.3, 0.0), (0.0, 0.0)))
def test_split_is_a_partition_by_class(size, validation, test):
    labels = np.random.default_rng(0).integers(0, 3, size)
    ids = roles.split(labels, size, validation=validation, test=test)
    assert list(ids) == ["train"] + ["validation"] * bool(validation) + ["test"] * bool(test)
    assert sorted(np.concatenate(list(ids.values()))) == list(range(size))
    assert {role: len(of_role) for role, of_role in ids.items()} == roles.sizes(size, validation=validation, test=test)
    for of_role in ids.values():
        assert of_role.dtype == np.int32 and np.all(np.diff(of_role) > 0)
        share = np.bincount(labels, minlength=3) * len(of_role) / size
        assert np.abs(np.bincount(labels[of_role], minlength=3) - share).max() <= 2


def test_the_cut_depends_on_labels_and_size_alone_and_scatters():
    labels = np.repeat(np.arange(4), 250)
    rest, cut = roles.cut(labels, 1000, 0.1)
    again = roles.cut(labels.copy(), 1000, 0.1)
    assert np.array_equal(cut, again[1]) and np.array_equal(rest, again[0])
    assert np.bincount(labels[cut]).tolist() == [25, 25, 25, 25]
    assert np.diff(cut).std() > 3  # not every tenth
    assert len(roles.cut(None, 1000, 0.1)[1]) == 100


def test_from_arrays_cuts_what_is_not_given():
    images, labels = np.zeros((50, 4, 4), np.uint8), np.arange(50) % 5
    dataset = from_arrays(images, labels)
    assert dict(dataset.sizes) == {"train": 35, "validation": 5, "test": 10} and dataset.num_classes == 5
    assert {role: len(source) for role, source in dataset.open().items()} == dict(dataset.sizes)
    assert dataset.spec["image"].shape == (4, 4, 1)
    own = from_arrays((images, labels), validation={"image": images[:7], "label": labels[:7]}, test=(images, labels))
    assert dict(own.sizes) == {"train": 50, "validation": 7, "test": 50}
    assert list(from_arrays({"image": images}, validation=0, test=0).sizes) == ["train"]
    assert from_arrays(images, labels, class_names="abcdefg").num_classes == 7
    assert from_arrays({"x": np.zeros((9, 2))}, test=0.2).num_classes is None


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.arange(9) % 4, 4),
        (np.arange(9) % 2, 2),
        (np.eye(9, 5, dtype=int), 5),  # several labels an example
        (np.arange(27).reshape(9, 3) % 4, 4),  # a label for each of three things
        (np.arange(36).reshape(9, 2, 2) % 2, 2),  # for each pixel
    ],
)
def test_the_classes_are_counted(labels, classes):
    assert from_arrays({"x": np.zeros((9, 2)), "label": labels}, validation=0, test=0).num_classes == classes


def test_from_arrays_refuses_other_shapes_in_another_role():
    images = np.zeros((50, 4, 4), np.uint8)
    with pytest.raises(UserError, match="test.*image"):
        from_arrays({"image": images}, test={"image": images[:, :3]})


SPEC = {"image": jax.ShapeDtypeStruct((12, 12, 3), np.uint8), "label": jax.ShapeDtypeStruct((), np.int32)}


@pytest.mark.parametrize(
    "field",
    (
        jax.ShapeDtypeStruct((12, 12, 3), np.uint8),
        jax.ShapeDtypeStruct((8, 8, 1), np.float32),
        jax.ShapeDtypeStruct((20,), np.float32),
        jax.ShapeDtypeStruct((64,), np.int32),
        jax.ShapeDtypeStruct((), np.int32),
        jax.ShapeDtypeStruct((), np.float32),
    ),
)
def test_synthetic_examples_follow_the_spec_and_their_id(field):
    source = SyntheticSource({"x": field}, 100, 10)
    batch = source.get(np.array([3, 50, 3]))["x"]
    assert batch.shape == (3, *field.shape) and batch.dtype == field.dtype
    assert np.array_equal(batch[0], batch[2])
    assert np.array_equal(batch, SyntheticSource({"x": field}, 100, 10).get(np.array([3, 50, 3]))["x"])
    if np.issubdtype(field.dtype, np.floating):
        assert batch.min() >= 0 and batch.max() <= 9
    if field.dtype == np.int32:
        assert batch.min() >= 0 and batch.max() < 10


def test_synthetic_classes_can_be_learnt_and_carry_over_to_other_roles():
    dataset = synthetic(from_arrays(np.zeros((100, 12, 12, 3), np.uint8), np.arange(100) % 10))
    opened = dataset.open()
    assert dataset.synthetic and {role: len(source) for role, source in opened.items()} == dict(dataset.sizes)
    train, test = (opened[role].get(np.arange(len(opened[role]))) for role in ("train", "test"))
    centres = np.stack([train["image"][train["label"] == k].mean(0) for k in range(10)])  # [K, H, W, C]
    distance = ((test["image"][:, None] - centres) ** 2).mean((2, 3, 4))  # [N, K]
    assert np.array_equal(distance.argmin(1), test["label"])
    assert not np.array_equal(train["image"][:20], test["image"])


def test_a_synthetic_set_of_unknown_size_has_nominal_sizes():
    dataset = sources.Dataset("x", SPEC, 10, (), dict)
    assert dict(synthetic(dataset).sizes) == {"train": 512, "validation": 128, "test": 128}
    assert len(synthetic(dataset).open()["train"]) == 512
