"""The config: every key typed, every mistake one line that names it, and what identifies a run."""

import copy
import pathlib
import pickle
import textwrap

import ml_collections
import pytest

from jaxtrain import config as configs
from jaxtrain.config import KEYS, base_config, checked, load
from jaxtrain.config.keys import KINDS
from jaxtrain.errors import UserError

ME = __name__
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# Another legal value for every key.
OTHER = {
    "replicas": 3,
    "seed": 1,
    "total": "20ep",
    "batch_size": 64,
    "data": dict(name="digits", validation=0.3),
    "synthetic": "if_absent",
    "drop_remainder": True,
    "initialise": (dict(name="dirac", paths="convs"),),
    "test_time": "mirror",
    "param_groups": (dict(name="sgd", learning_rate=0.1, paths="bias", schedule="linear", until="2ep"),),
    "augment": (dict(name="flip", p=0.25), "cutout"),
    "preprocess": (dict(name="normalise", mean=(0.5,), std=(0.25,)),),
    "task": dict(name="classification", label_smoothing=0.1),
    "model": dict(name=f"{ME}:Net", width=16),
    "step": f"{ME}:own_step",
    "init_from": "runs/other",
    "init_head": "new",
    "init_positions": "resample",
    "optimizer": dict(name="sgd", learning_rate=0.1, momentum=0.9),
    "schedule": dict(name="cosine", warmup="5st"),
    "clip_norm": 1.0,
    "decay_rules": (("bias", 1.0),),
    "lr_rules": (("head", 10.0), ("stem/.*", 0.0)),
    "frozen": ("stem/.*",),
    "ema": 0.999,
    "accumulate": 2,
    "precision": "bfloat16",
    "on_nonfinite": "skip",
    "max_skipped": 3,
    "max_rollbacks": 3,
    "best": "loss",
    "best_mode": "min",
    "patience": 5,
    "platform": "cpu",
    "devices": (0, 2),
    "device_memory": 0.5,
    "deterministic": True,
    "distributed": "off",
    "join_minutes": 1.5,
    "mesh": (("data", 4), ("model", 2)),
    "sharding_rules": (("kernel", (None, "model")),),
    "threads": 3,
    "prefetch": 4,
    "loader": "threads",
    "steps_per_dispatch": 4,
    "compile_cache": "",
    "eval_batch_size": 256,
    "report_every": "10st",
    "eval_every": "",
    "evals": {"train": dict(source="train", every="2ep"), "own": dict(fn=f"{ME}:own_step")},
    "test": "no",
    "checkpoint.every": "1ep",
    "checkpoint.minutes": 0.0,
    "checkpoint.keep": 5,
    "checkpoint.keep_every": "10ep",
    "max_minutes": 5.0,
    "hang_minutes": 5.0,
    "tensorboard": False,
    "terminal": "plain",
}


GROUP = dict(name="sgd", learning_rate=0.1, paths="bias")


class Net:
    """A model builder."""

    def __init__(self, width: int = 8, rates: tuple[float, ...] = (), bias: bool = True, *, num_classes: int = 0):
        self.width = width


def small_net(width: int = 4, depth: int = 1):
    return width, depth


def own_step(*, parts=None):
    return parts


def sample(**changes) -> configs.Config:
    config = base_config()
    config.model = f"{ME}:Net"
    for key, value in changes.items():
        config[key] = value
    return config


def with_other(key: str) -> configs.Config:
    config = sample()
    group, _, name = key.rpartition(".")
    (config[group] if group else config)[name] = OTHER[key]
    return config


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a config file whose get_config has this body into the current folder, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(body: str, arguments: str = "") -> str:
        lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        (tmp_path / "my.py").write_text(
            "from jaxtrain.config import base_config\n"
            f"def get_config({arguments}):\n"
            f"    config = base_config(); config.model = '{ME}:Net'\n"
            f"{lines}\n"
            "    return config\n"
        )
        return "my.py"

    return write


def refusal(function, *args, **kwargs) -> str:
    """The one line with which it is refused."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    line = str(caught.value)
    assert line and "\n" not in line
    return line


def missing(expected: list[str], line: str) -> list[str]:
    return [text for text in expected if text not in line]


def test_the_table_of_keys_is_whole():
    assert set(OTHER) == set(KEYS)
    for key, about in KEYS.items():
        assert about.kind in KINDS
        assert about.doc
        assert configs.get(base_config(), key) == about.default
        assert configs.get(with_other(key), key) != about.default


@pytest.mark.parametrize("key", KEYS)
def test_every_key_takes_another_value_and_knows_whether_it_changes_the_result(key):
    changed = with_other(key)
    configs.check(changed)
    changes_result = configs.run_hash(changed) != configs.run_hash(sample())
    assert changes_result == (KEYS[key].kind == "run")
    named = {name for name, _, _ in configs.differing(sample(), changed)}
    assert bool(named) == changes_result
    assert all(name.split(".")[0] == key for name in named)


@pytest.mark.parametrize("key", KEYS)
def test_json_gives_the_same_config_back(key):
    config = with_other(key)
    assert configs.from_json(configs.to_json(config, indent=2)) == config
    written_out = checked(config)
    assert configs.from_json(configs.to_json(written_out)) == written_out


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_is_an_equal_config_that_knows_its_keys(duplicate):
    config = with_other("evals")
    again = duplicate(config)
    assert again == config
    assert "there is no config.sed" in refusal(setattr, again, "sed", 1)


def test_a_config_stays_itself_through_ml_collections():
    config = sample().copy_and_resolve_references()
    with config.unlocked():
        config.seed = 3
    assert config.is_locked
    assert config.checkpoint.keep == 2
    config.model.width = 5  # options stay open: the builder's signature checks them
    assert checked(config).model.width == 5
    config.update(dict(total="3ep"))
    assert config.total == "3ep"
    assert "there is no config.lr" in refusal(config.update, dict(lr=3))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model", "resnet", {"name": "resnet"}),
        (
            "augment",
            ["flip", dict(name="crop", padding=2)],
            ({"name": "flip"}, {"name": "crop", "padding": 2}),
        ),
        ("clip_norm", 1, 1.0),
        ("devices", [0, 1], (0, 1)),
        ("devices", 2, 2),
        ("lr_rules", [["head", 2]], (("head", 2.0),)),
    ],
)
def test_values_are_brought_into_one_form_where_they_are_assigned(key, value, expected):
    config = base_config()
    config[key] = value
    assert configs.get(config, key) == expected


def test_a_group_keeps_what_is_not_assigned():
    config = sample(checkpoint=dict(minutes=1))
    assert (config.checkpoint.minutes, config.checkpoint.keep) == (1.0, 2)


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (
            lambda config: setattr(config, "batchsize", 1),
            ["no config.batchsize", "'config.batch_size'", "seed"],
        ),
        (lambda config: setattr(config, "learning_rate", 1), ["'config.optimizer.learning_rate'"]),
        (lambda config: setattr(config, "lr", 1), ["no config.lr", "'config.optimizer.learning_rate'"]),
        (lambda config: setattr(config, "keep", 1), ["'config.checkpoint.keep'"]),
        (lambda config: config["sed"], ["no config.sed", "'config.seed'"]),
        (lambda config: config.sed, ["no config.sed", "'config.seed'"]),
        (lambda config: config.get("typo", 7), ["no config.typo", "Known: seed"]),
        (
            lambda config: config.checkpoint.get("kep", 7),
            ["no config.checkpoint.kep", "'config.checkpoint.keep'"],
        ),
        (lambda config: setattr(config.checkpoint, "kep", 1), ["no config.checkpoint.kep", "keep_every"]),
        (lambda config: setattr(config, "checkpoint", dict(kep=1)), ["no config.checkpoint.kep"]),
        (lambda config: setattr(config, "checkpoint", 3), ["config.checkpoint is 3", "minutes"]),
        (lambda config: setattr(config, "seed", "1"), ["config.seed is '1' (str)", "an int"]),
        (lambda config: setattr(config, "seed", True), ["config.seed is True", "an int"]),
        (lambda config: setattr(config, "ema", "high"), ["config.ema is 'high'", "a float"]),
        (lambda config: setattr(config, "clip_norm", float("nan")), ["config.clip_norm is nan"]),
        (lambda config: setattr(config, "total", 10), ["config.total is 10", "text"]),
        (lambda config: setattr(config, "precision", "bf16"), ["'bf16'", "'bfloat16'"]),
        (lambda config: setattr(config, "model", 3), ["config.model is 3", "a name or dict(name="]),
        (lambda config: setattr(config, "model", dict(name="mlp", act=print)), ["config.model.act", "print"]),
        (lambda config: setattr(config, "frozen", "stem"), ["config.frozen is 'stem'", "a tuple of text"]),
    ],
)
def test_a_wrong_key_or_type_is_refused_where_it_is_assigned(attempt, expected):
    assert missing(expected, refusal(attempt, base_config())) == []


def test_hasattr_works_on_a_config():
    assert hasattr(base_config(), "seed")
    assert not hasattr(base_config(), "sed")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seed", -1, ["config.seed is -1"]),
        ("batch_size", 0, ["config.batch_size is 0", "1 or more"]),
        ("accumulate", 3, ["config.accumulate is 3", "batch_size", "128"]),
        ("ema", 1.0, ["config.ema is 1.0", "less than 1"]),
        ("device_memory", 1.5, ["config.device_memory is 1.5"]),
        ("clip_norm", -1, ["config.clip_norm is -1.0", "0 or more"]),
        ("total", "10", ["config.total is '10'", "'10ep'"]),
        ("total", "0ep", ["config.total is '0ep'"]),
        ("eval_every", "often", ["config.eval_every is 'often'", "'1ep'", "never"]),
        ("checkpoint", dict(every="1"), ["config.checkpoint.every is '1'"]),
        ("frozen", ("a(",), ["config.frozen", "a(", "regular expressions"]),
        ("sharding_rules", (("[", (None,)),), ["config.sharding_rules", "regular expressions"]),
        ("devices", 0, ["config.devices is 0", "'all'"]),
        ("devices", (1, 1), ["config.devices is (1, 1)", "repeats"]),
        ("devices", (), ["config.devices is ()"]),
        ("model", "resnt", ["unknown model 'resnt'", "'resnet'", "cnn, ", "mlp, "]),
        ("model", dict(name="test:Net", x=[1]), ["model 'test:Net'"]),
        ("model", dict(width=3), ["is no part"]),
        (
            "model",
            dict(name=f"{ME}:Net", wdth=3),
            ["no option 'wdth'", "config.model.wdth", "'width'", "rates"],
        ),
        ("model", dict(name=f"{ME}:Net", width=1.5), ["config.model.width is 1.5", "an int"]),
        ("model", dict(name=f"{ME}:Net", rates=(1, "x")), ["config.model.rates", "a tuple of float"]),
        ("model", dict(name=f"{ME}:Net", num_classes=3), ["no option 'num_classes'"]),
        ("task", "classify", ["unknown task 'classify'", "classification"]),
        ("data", "mnist", ["unknown data set 'mnist'", "digits, ", "tfds"]),
        ("data", dict(name="tfds"), ["data set 'tfds' needs dataset", "config.data.dataset"]),
        ("augment", ("flip", "crp"), ["unknown augmentation 'crp'", "'crop'"]),
        (
            "augment",
            (dict(name="flip", q=1),),
            ["augmentation 'flip' has no option 'q'", "config.augment[0].q"],
        ),
        (
            "optimizer",
            dict(name="adamv", learning_rate=1.0),
            ["unknown optimizer 'adamv'", "'adam'", "adamw"],
        ),
        ("optimizer", "sgd", ["optimizer 'sgd' needs learning_rate"]),
        ("optimizer", dict(name="sgd", learning_rate=1, momentm=1), ["no option 'momentm'", "'momentum'"]),
        ("schedule", "cosin", ["unknown schedule 'cosin'", "'cosine'", "one_cycle"]),
        ("schedule", dict(name="cosine", warmup="10"), ["config.schedule.warmup is '10'", "'2ep'"]),
        ("schedule", dict(name="cosine", warmup=10), ["config.schedule.warmup is 10"]),
        ("step", "own", ["unknown step 'own'", "supervised"]),
        ("evals", dict(x=3), ["config.evals.x is 3", "dict("]),
        ("evals", dict(x=dict(evry="1ep")), ["no option 'evry'", "'every'"]),
        ("evals", dict(x=dict(every="1")), ["config.evals.x.every is '1'"]),
        ("evals", dict(x=dict(source="trian")), ["unknown data set 'trian'"]),
        ("evals", dict(x=dict(task="classify")), ["unknown task"]),
        ("evals", dict(x=dict(test_time="miror")), ["'miror'", "'mirror'"]),
        ("evals", dict(x=dict(fn=f"{ME}:Net", test_time="mirror")), ["both"]),
        ("test_time", dict(name="mirror_and_shift", shft=1), ["'shft'", "config.test_time"]),
        ("initialise", (dict(name="dirac"),), ["dirac", "config.initialise[0].paths"]),
        ("param_groups", (dict(name="sgd", paths="a"),), ["config.param_groups[0].learning_rate"]),
        ("param_groups", (GROUP | dict(until="2"),), ["config.param_groups[0].until is '2'"]),
        ("param_groups", (GROUP | dict(schedule="lienar"),), ["'lienar'", "'linear'"]),
        ("param_groups", (GROUP | dict(schedule=dict(name="linear", fnal=0.1)),), ["'fnal'", "param_groups[0]"]),
        ("param_groups", (GROUP | dict(paths=3),), ["config.param_groups[0].paths is 3"]),
        ("evals", dict(x=dict(fn="nowhere")), ["unknown evaluation function"]),
        ("evals", dict(x=dict(fn=f"{ME}:Net", task="classification")), ["both"]),
    ],
)
def test_an_illegal_value_is_refused_by_check(key, value, expected):
    config = sample()
    config[key] = value
    line = refusal(configs.check, config)
    assert missing(expected, line) == [], line


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ml_collections.ConfigDict({"seed": 3}), ["lacks ", "base_config()"]),
        ({}, ["lacks ", "base_config()"]),
        (None, ["NoneType", "base_config()"]),
    ],
)
def test_a_config_must_come_from_base_config(config, expected):
    assert missing(expected, refusal(configs.check, config)) == []


def test_a_checked_config_says_all_it_means_and_leaves_the_given_one_alone():
    config = sample(optimizer=dict(name="adamw", learning_rate=1), augment=["flip"])
    found = checked(config)
    assert found.model.to_dict() == {"name": f"{ME}:Net", "width": 8, "rates": (), "bias": True}
    assert found.optimizer.learning_rate == 1.0
    assert found.optimizer.weight_decay == 1e-4
    assert found.augment == ({"name": "flip", "p": 0.5},)
    assert config == sample(optimizer=dict(name="adamw", learning_rate=1), augment=["flip"])
    assert checked(found) == found


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (dict(model=f"{ME}:Net"), dict(model=dict(name=f"{ME}:Net", width=8, bias=True))),
        (dict(total="10ep"), dict(total="10.0 ep")),
        (dict(total="1kst"), dict(total="1000st")),
        (dict(lr_rules=(("a", 1),)), dict(lr_rules=[["a", 1.0]])),
        (dict(augment=("flip",)), dict(augment=(dict(name="flip", p=0.5),))),
        (
            dict(data=dict(name="tfds", dataset="a")),
            dict(data=dict(name="tfds", dataset="a", dir="/elsewhere")),
        ),
    ],
)
def test_the_same_run_written_differently_is_the_same_run(a, b):
    assert configs.run_hash(sample(**a)) == configs.run_hash(sample(**b))
    assert configs.differing(sample(**a), sample(**b)) == []


def test_differences_name_the_options_and_their_values():
    a = sample(augment=("flip",))
    b = sample(model=dict(name=f"{ME}:Net", width=9), seed=1, augment=(dict(name="flip", p=0.25),))
    assert configs.differing(a, b) == [
        ("seed", 0, 1),
        ("augment.0.p", 0.5, 0.25),
        ("model.width", 8, 9),
    ]
    other = sample(model=f"{ME}:small_net")
    assert configs.differing(a, other) == [
        ("augment.0.name", "flip", None),
        ("model.name", f"{ME}:Net", f"{ME}:small_net"),
    ]


def test_the_hash_is_eight_hex_digits_that_do_not_depend_on_the_process():
    assert configs.run_hash(sample()) == configs.run_hash(copy.deepcopy(sample()))
    assert len(configs.run_hash(sample())) == 8
    int(configs.run_hash(sample()), 16)


def test_a_config_of_a_version_with_other_keys():
    assert configs.from_json('{"seed": 4}').seed == 4
    assert "there is no config.tomorrow" in refusal(configs.from_json, '{"tomorrow": 1}')


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        ("seed: int = 0", "seed=3", 3),
        ("seed=0", "seed=3", 3),
        ("name: str = '', seed=0", "name=a:b,seed=3", 3),
        ("seed=0, *, smoke=False", "smoke,seed=4", 4),
        ("seed=0, smoke: bool = False", "smoke=true,seed=5", 5),
        ("ids: tuple[int, ...] = (), seed=0", "ids=(1,2),seed=6", 6),
        ("ids=(), seed=0", "ids='a,b',seed=6", 6),
        ("seed=0, **rest", "other=1,seed=7", 7),
    ],
)
def test_arguments_reach_get_config(write, arguments, given, expected):
    name = write("config.seed = seed", arguments)
    assert load(f"{name}:{given}").seed == expected


def test_arguments_are_typed(write):
    body = "config.init_from = repr((smoke, width, name, ids, share))"
    name = write(body, "smoke=False, width: int = 1, name='', ids: tuple[int, ...] = (), share: float | None = None")
    found = load(f"{name}:smoke,width=3,name=3,ids=[4,5],share=1").init_from
    assert found == repr((True, 3, "3", (4, 5), 1.0))


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        ("smoke=False", "smok", ["my.py has no option 'smok'", "'smoke'"]),
        ("", "smoke", ["my.py has no option 'smoke'", "Known: none"]),
        ("width=1", "width=a", ["width is 'a'", "an int"]),
        ("width=1", "width", ["width", "write width=…"]),
        ("width", "", ["my.py needs width"]),
    ],
)
def test_wrong_arguments_are_refused(write, arguments, given, expected):
    name = write("pass", arguments)
    assert missing(expected, refusal(load, f"{name}:{given}")) == []


@pytest.mark.parametrize(
    ("text", "value", "key", "expected"),
    [
        ("seed=3", 3, "seed", 3),
        ("total=3ep", "3ep", "total", "3ep"),
        ("ema=0", 0, "ema", 0.0),
        ("tensorboard=false", False, "tensorboard", False),
        ("devices=0,1", (0, 1), "devices", (0, 1)),
        ("devices=2", 2, "devices", 2),
        ("devices=all", "all", "devices", "all"),
        ("frozen=stem/.*", ("stem/.*",), "frozen", ("stem/.*",)),
        ("lr_rules=(('head', 2),)", [("head", 2)], "lr_rules", (("head", 2.0),)),
        ("augment=flip,cutout", ("flip", "cutout"), "augment", ({"name": "flip"}, {"name": "cutout"})),
        (
            "augment=(dict(name='flip',p=.1),)",
            [dict(name="flip", p=0.1)],
            "augment",
            ({"name": "flip", "p": 0.1},),
        ),
        ("augment=", (), "augment", ()),
        ("checkpoint.keep=7", 7, "checkpoint.keep", 7),
        ("model.width=16", 16, "model.width", 16),
        ("model.rates=1,2", [1, 2], "model.rates", (1.0, 2.0)),
        ("model.bias=False", False, "model.bias", False),
        ("optimizer.nesterov=true", True, "optimizer.nesterov", True),
        ("optimizer.weight_decay=1e-2", 1e-2, "optimizer.weight_decay", 0.01),
        ("schedule.warmup=2ep", "2ep", "schedule.warmup", "2ep"),
        ("evals.own.source=train", "train", "evals.own.source", "train"),
        ("evals.own=dict(source='test', every='3ep')", dict(source="test"), "evals.own.source", "test"),
    ],
)
def test_an_override_is_typed_by_its_key_or_its_builders_signature(write, text, value, key, expected):
    name = write("pass")
    path = text.partition("=")[0]
    for found in (load(name, [text]), load(name, {path: value}), load(name, **{path: value})):
        for part in key.split("."):
            found = found[part]
        assert (found.to_dict() if hasattr(found, "to_dict") else found) == expected


def test_nested_mappings_are_merged():
    config = load("configs/digits.py", {"checkpoint": {"keep": 3}}, optimizer=dict(b1=0.5))
    assert (config.checkpoint.keep, config.checkpoint.minutes) == (3, 10.0)
    assert config.optimizer.b1 == 0.5
    assert config.optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["seed"], ["'seed' sets nothing", "key=value"]),
        (["sed=3"], ["--config.sed=3", "no config.sed", "'config.seed'"]),
        (["lr=3"], ["--config.lr=3", "'config.optimizer.learning_rate'"]),
        (["seed=x"], ["--config.seed=x", "an int"]),
        (["seed.x=1"], ["--config.seed.x=1", "one value"]),
        (["checkpoint=1"], ["--config.checkpoint=1", "minutes"]),
        (["checkpoint.kep=1"], ["--config.checkpoint.kep=1", "'config.checkpoint.keep'"]),
        (["tensorboard=maybe"], ["--config.tensorboard=maybe", "true or false"]),
        (["precision=bf16"], ["--config.precision=bf16", "'bfloat16'"]),
        (["modl.width=3"], ["--config.modl.width=3", "config.modl.width", "'config.model'"]),
        (["model.wdth=3"], ["--config.model.wdth=3", "no option 'wdth'", "'width'", "rates"]),
        (["model.width=wide"], ["--config.model.width=wide", "an int"]),
        (["model=resnt"], ["--config.model=resnt", "unknown model 'resnt'", "'resnet'"]),
        (["model.name=resnt"], ["--config.model.name=resnt", "unknown model 'resnt'"]),
        (["optimizer.momentum=0.9"], ["--config.optimizer.momentum=0.9", "'adamw' has no option 'momentum'"]),
        (["evals.own.evry=1ep"], ["no option 'evry'", "'every'"]),
        ({"model.width": "wide"}, ["config.model.width='wide'", "an int"]),
        ({"model": {"wdth": 3}}, ["config.model.wdth=3", "'width'"]),
        ({"sed": 3}, ["config.sed=3", "'config.seed'"]),
        ({"batch_size": 0}, ["config.batch_size is 0"]),
    ],
)
def test_a_wrong_override_names_what_was_typed(write, changes, expected):
    line = refusal(load, write("pass"), changes)
    assert missing(expected, line) == [], line


def test_another_builder_drops_the_options_of_the_old_one_and_says_so(write):
    name = write(f"config.model = dict(name='{ME}:Net', width=3, bias=False)")
    said: list[str] = []
    config = load(name, ["model.depth=2", f"model.name={ME}:small_net"], say=said.append)
    assert config.model.to_dict() == {"name": f"{ME}:small_net", "depth": 2}
    assert len(said) == 1
    assert missing(["config.model", f"{ME}:small_net", "width=3", "bias=False", f"{ME}:Net"], said[0]) == []


def test_another_optimizer_keeps_the_rate_and_the_decay_and_says_so(write):
    name = write("config.optimizer = dict(name='adamw', learning_rate=.1, weight_decay=.2, b1=.5)")
    said: list[str] = []
    config = load(name, {"optimizer": "sgd"}, say=said.append)
    assert config.optimizer.to_dict() == {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.2}
    assert missing(["b1=0.5", "kept: learning_rate=0.1, weight_decay=0.2"], said[0]) == []


def test_naming_the_same_builder_keeps_its_options(write):
    said: list[str] = []
    name = write(f"config.model = dict(name='{ME}:Net', width=3)")
    assert load(name, [f"model={ME}:Net"], say=said.append).model.width == 3
    assert said == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("config.sed = 1", ["my.py line 4", "no config.sed", "'config.seed'"]),
        ("config.seed = 'x'", ["my.py line 4", "config.seed is 'x'"]),
        ("pass\n1 / 0", ["my.py line 5", "ZeroDivisionError"]),
        ("import no_such_module", ["my.py line 4", "no_such_module"]),
        ("return None", ["NoneType", "base_config()"]),
        ("config.model = dict(name='cnn', width=", ["my.py", "SyntaxError"]),
        ("raise RuntimeError('two\\nlines')", ["my.py line 4", "two lines"]),
        (f"config.model = dict(name='{ME}:Net', wdth=1)", ["my.py", "no option 'wdth'"]),
        ("config.batch_size = -1", ["my.py", "config.batch_size is -1"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_line(write, body, expected):
    line = refusal(load, write(body))
    assert missing(expected, line) == [], line


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere.py", ["no config file 'nowhere.py'", "configs/digits.py"]),
        ("configs/digit.py", ["no config file 'configs/digit.py'", "'configs/digits.py'"]),
        ("mine.py", ["no config file 'mine.py'", "'my.py'"]),
        (".", ["is a folder"]),
        ("empty.py", ["empty.py has no function get_config"]),
    ],
)
def test_a_file_that_is_none(write, tmp_path, spec, expected):
    write("pass")
    (tmp_path / "empty.py").write_text("")
    line = refusal(load, spec)
    assert missing(expected, line) == [], line


def test_loading_a_file_leaves_nothing_behind(write, tmp_path):
    load(write("pass"))
    assert [path.name for path in tmp_path.iterdir()] == ["my.py"]


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "configs").glob("*.py")))
@pytest.mark.parametrize("arguments", ["", ":smoke"])
def test_the_configs_that_come_with_jaxtrain_load_from_anywhere(tmp_path, monkeypatch, name, arguments):
    monkeypatch.chdir(tmp_path)
    assert load(f"configs/{name}{arguments}").is_locked
    assert list(tmp_path.iterdir()) == []
