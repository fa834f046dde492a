"""Names → builders: tables that resolve, a user's own, signatures as schemas, mistakes in one line."""

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest
from flax import nnx

from jaxtrain.config import lookup, schema
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from elsewhere import Unknown

ME = __name__
KINDS = [
    lookup.MODEL,
    lookup.TASK,
    lookup.DATASET,
    lookup.AUGMENTATION,
    lookup.SCHEDULE,
    lookup.STEP,
    lookup.OPTIMIZER,
    lookup.PARAM_GROUP,
    lookup.INITIALISER,
    lookup.TEST_TIME,
]
A_NUMBER = 3


class Net(nnx.Module):
    """A user's model; its metaclass hides the signature from `inspect`."""

    def __init__(self, width: int = 8, rates: tuple[float, ...] = (0.1,), *, num_classes: int, rngs: nnx.Rngs):
        self.width, self.rates, self.num_classes = width, rates, num_classes


@dataclasses.dataclass
class Settings:
    depth: int
    mode: Literal["a", "b"] = "a"


class Pair(NamedTuple):
    left: int
    right: int = 0


def told(width, deep=False, names=(), *args, **rest):
    return {"width": width, "deep": deep, "names": names, "rest": rest}


def written_as_text(width: "int", other: "Unknown" = "x", size: "Unknown | None" = None):
    return width, other, size


def own_optimizer(rate, momentum: float = 0.9, mask: Any = None):
    return rate, momentum


def described(options: lookup.Options) -> dict[str, str]:
    return {name: schema.describe(each.annotation) for name, each in options.items()}


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind.word} {name}") for kind in KINDS for name in kind.table],
)
def test_every_name_of_every_table_is_a_builder_with_options(kind, name):
    assert callable(lookup.resolve(name, kind.table, kind.word))
    options = lookup.options_of(kind, name)
    assert not set(kind.supplied) & set(options)
    assert all(option.isidentifier() for option in options)


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("resnt", ["resnet", "mlp"], "resnet"),
        ("ResNet", ["resnet", "mlp"], "resnet"),
        ("lr", ["learning_rate", "momentum"], "learning_rate"),
        ("wd", ["weight_decay", "width"], "weight_decay"),
        ("vit", ["resnet", "mlp"], ""),
        ("", ["resnet"], ""),
        ("a", [], ""),
    ],
)
def test_nearest(name, choices, expected):
    assert lookup.nearest(name, choices) == expected


def test_a_hint_names_the_nearest_and_the_choices():
    assert lookup.choices_hint("resnt", ["resnet", "cnn"]) == " Did you mean 'resnet'? Known: cnn, resnet."
    assert lookup.choices_hint("vit", ["resnet"]) == " Known: resnet."
    assert lookup.choices_hint("vit", []) == " Known: none."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnt", ["unknown model 'resnt'", "'resnet'", "package.module:function"]),
        ("no_such_package.nets:unet", ["no module 'no_such_package'"]),
        ("jaxtrain.no_such_module:unet", ["no module 'jaxtrain.no_such_module'"]),
        (f"{ME}:Nett", [f"module {ME} has no 'Nett'", f"{ME}:Net"]),
        (f"{ME}:A_NUMBER", ["int", "not something to call"]),
        (f"{ME}:", ["unknown model"]),
        (":unet", ["unknown model"]),
        ("jaxtrain.models", ["unknown model"]),
        (3, ["unknown model 3"]),
    ],
)
def test_a_name_that_is_nothing_is_told_in_one_line(name, expected):
    with pytest.raises(UserError) as caught:
        lookup.resolve(name, lookup.MODELS, "model")
    assert "\n" not in str(caught.value)
    assert [text for text in expected if text not in str(caught.value)] == []


def test_an_error_inside_a_users_module_names_its_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "broken_lab.py").write_text("x = 1\n\nx.shape\n")
    (tmp_path / "needy_lab.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"AttributeError.*shape.*broken_lab\.py line 3"):
        lookup.resolve("broken_lab:net", lookup.MODELS, "model")
    with pytest.raises(UserError, match=r"not_installed_anywhere.*needy_lab\.py line 1"):
        lookup.resolve("needy_lab:net", lookup.MODELS, "model")


@pytest.mark.parametrize(
    ("builder", "supplied", "expected"),
    [
        (Net, ("rngs", "num_classes"), {"width": "an int", "rates": "a tuple of float"}),
        (Pair, (), {"left": "an int", "right": "an int"}),
        (Settings, (), {"depth": "an int", "mode": "one of 'a', 'b'"}),
        (written_as_text, (), {"width": "an int", "other": "text", "size": "a plain value"}),
        (told, ("width",), {"deep": "true or false", "names": "a tuple", "rest": "a plain value"}),
    ],
)
def test_the_signature_is_the_schema(builder, supplied, expected):
    assert described(lookup.options(builder, supplied)) == expected


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("adamw", {"b1": 0.9, "weight_decay": 1e-4, "nesterov": False}, {"mask"}),
        ("sgd", {"momentum": None, "weight_decay": 0.0}, set()),
        ("lars", {"trust_coefficient": 0.001}, {"weight_decay_mask", "trust_ratio_mask"}),
        ("muon", {"ns_steps": 5, "momentum": 0.95}, {"dtype"}),
        ("optax.contrib:muon", {"ns_steps": 5, "beta": 0.95}, {"muon_weight_dimension_numbers", "adam_learning_rate"}),
        ("prodigy", {"learning_rate": 1.0}, set()),
        (f"{ME}:own_optimizer", {"momentum": 0.9, "weight_decay": 0.0}, {"rate", "mask"}),
    ],
)
def test_an_optimizer_takes_a_rate_a_decay_and_what_optax_says_but_no_masks(name, present, absent):
    options = lookup.options_of(lookup.OPTIMIZER, name)
    assert {option: options[option].default for option in present} == present
    assert not absent & set(options)
    rate = options["learning_rate"]
    assert rate.annotation is float
    assert name == "prodigy" or rate.default is inspect.Parameter.empty


def test_a_part_is_checked_typed_and_written_out():
    part = {"name": f"{ME}:Net", "width": 16, "rates": [1, 2]}
    expected = {"name": f"{ME}:Net", "width": 16, "rates": (1.0, 2.0)}
    assert lookup.checked(part, lookup.MODEL, "config.model") == expected
    bare = lookup.checked(f"{ME}:Net", lookup.MODEL, "config.model")
    assert bare == {"name": f"{ME}:Net", "width": 8, "rates": (0.1,)}
    assert lookup.checked(f"{ME}:Net", lookup.MODEL, "config.model", fill=False) == {"name": f"{ME}:Net"}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"name": f"{ME}:Net", "wdth": 3}, ["no option 'wdth'", "'width'", "rates", "config.model.wdth"]),
        ({"name": f"{ME}:Net", "width": "a"}, ["config.model.width is 'a'", "an int"]),
        ({"name": f"{ME}:Net", "rngs": 0}, ["no option 'rngs'"]),
        ({"name": f"{ME}:Settings"}, ["needs depth", "config.model.depth", "an int"]),
        ({"width": 3}, ["is no part"]),
        (7, ["is no part"]),
    ],
)
def test_a_wrong_option_is_told_in_one_line(part, expected):
    with pytest.raises(UserError) as caught:
        lookup.checked(part, lookup.MODEL, "config.model")
    assert "\n" not in str(caught.value)
    assert [text for text in expected if text not in str(caught.value)] == []


def test_build_passes_options_and_what_of_the_supplied_the_signature_names():
    part = {"name": f"{ME}:Net", "width": 16}
    net = lookup.build(part, {}, "model", num_classes=7, rngs=nnx.Rngs(0), dtype="float32")
    assert (net.width, net.rates, net.num_classes) == (16, (0.1,), 7)
    with pytest.raises(UserError, match="has no option 'num_classes'"):
        lookup.build({**part, "num_classes": 2}, {}, "model", num_classes=7, rngs=nnx.Rngs(0))
    loose = lookup.build({"name": f"{ME}:told", "width": 1, "any": (2,)}, {}, "thing")
    assert loose["rest"] == {"any": (2,)}
