"""Names and builders: a literal table for what comes with jaxtrain, `package.module:function` for a user's
own.

A part of a config is a name with options; the options are the keyword parameters of its builder, minus those
that the system supplies. The signature is the schema: nothing is registered, and a user's builder needs no
declaration.
"""

import dataclasses
import difflib
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ml_collections import ConfigDict

from jaxtrain.config import schema
from jaxtrain.errors import JaxtrainError, UserError

Part: TypeAlias = str | Mapping[str, Any] | ConfigDict
Options = dict[str, inspect.Parameter]
EMPTY = inspect.Parameter.empty

MODELS = {
    "airbench": "jaxtrain.models.airbench:AirBench",
    "cnn": "jaxtrain.models.cnn:CNN",
    "convnext": "jaxtrain.models.convnext:ConvNeXt",
    "encoder": "jaxtrain.models.encoder:Encoder",
    "gpt": "jaxtrain.models.decoder:Decoder",
    "llama": "jaxtrain.models.decoder:llama",
    "mlp": "jaxtrain.models.mlp:MLP",
    "resnet": "jaxtrain.models.resnet:ResNet",
    "rnn": "jaxtrain.models.rnn:RNN",
    "rnn_classifier": "jaxtrain.models.rnn:RNNClassifier",
    "unet": "jaxtrain.models.unet:UNet",
    "vit": "jaxtrain.models.vit:ViT",
    "wideresnet": "jaxtrain.models.wideresnet:WideResNet",
}
TASKS = {
    "classification": "jaxtrain.tasks.classification:Classification",
    "language_modelling": "jaxtrain.tasks.language_modelling:LanguageModelling",
    "multilabel": "jaxtrain.tasks.multilabel:MultiLabel",
    "regression": "jaxtrain.tasks.regression:Regression",
    "segmentation": "jaxtrain.tasks.segmentation:Segmentation",
    "sequence_classification": "jaxtrain.tasks.sequence_classification:SequenceClassification",
}
DATASETS = {
    "csv": "jaxtrain.data.csv:csv",
    "digits": "jaxtrain.data.digits:digits",
    "folder": "jaxtrain.data.folder:folder",
    "speakers": "jaxtrain.data.text:speakers",
    "text": "jaxtrain.data.text:text",
    "tfds": "jaxtrain.data.tfds:tfds",
    "tokens": "jaxtrain.data.tokens:tokens",
}
EVALUATIONS = {"sample": "jaxtrain.sample:report"}
AUGMENTATIONS = {
    "alternating_flip": "jaxtrain.data.augment:alternating_flip",
    "colour_jitter": "jaxtrain.data.augment:colour_jitter",
    "crop": "jaxtrain.data.augment:crop",
    "cutmix": "jaxtrain.data.augment:cutmix",
    "cutout": "jaxtrain.data.augment:cutout",
    "flip": "jaxtrain.data.augment:flip",
    "linear_jitter": "jaxtrain.data.augment:linear_jitter",
    "mixup": "jaxtrain.data.augment:mixup",
    "normalise": "jaxtrain.data.augment:normalise",
}
SCHEDULES = {
    "constant": "jaxtrain.schedules:constant",
    "cosine": "jaxtrain.schedules:cosine",
    "linear": "jaxtrain.schedules:linear",
    "one_cycle": "jaxtrain.schedules:one_cycle",
    "rsqrt": "jaxtrain.schedules:rsqrt",
    "step": "jaxtrain.schedules:step",
}
STEPS = {"supervised": "jaxtrain.step:supervised"}
INITIALISERS = {
    "dirac": "jaxtrain.initialisers:dirac",
    "unit_std": "jaxtrain.initialisers:unit_std",
    "whitening": "jaxtrain.initialisers:whitening",
}
TEST_TIMES = {
    "mirror": "jaxtrain.views:mirror",
    "mirror_and_shift": "jaxtrain.views:mirror_and_shift",
    "none": "jaxtrain.views:none",
}

# Every optimizer of optax that is a function of (gradients, state, parameters) alone and follows the learning
# rate it is given. Left out: line searches and Polyak steps, which want the loss (lbfgs, momo, sophia); those
# evaluated at other weights than they train (schedule_free); rprop and cocob, whose steps do not follow the
# rate; noisy_sgd, which keeps a random key of its own; differential privacy, which wants per-example
# gradients.
OPTIMIZERS = {
    "acprop": "optax.contrib:acprop",
    "adabelief": "optax:adabelief",
    "adadelta": "optax:adadelta",
    "adafactor": "optax:adafactor",
    "adagrad": "optax:adagrad",
    "adam": "optax:adam",
    "adamax": "optax:adamax",
    "adamaxw": "optax:adamaxw",
    "adamw": "optax:adamw",
    "adan": "optax:adan",
    "ademamix": "optax.contrib:ademamix",
    "adopt": "optax.contrib:adopt",
    "amsgrad": "optax:amsgrad",
    "dadapt_adamw": "optax.contrib:dadapt_adamw",
    "dog": "optax.contrib:dog",
    "dowg": "optax.contrib:dowg",
    "fromage": "optax:fromage",
    "galore": "optax.contrib:galore",
    "lamb": "optax:lamb",
    "lars": "optax:lars",
    "lion": "optax:lion",
    "madgrad": "optax.contrib:madgrad",
    "muon": "jaxtrain.muon:muon",
    "nadam": "optax:nadam",
    "nadamw": "optax:nadamw",
    "novograd": "optax:novograd",
    "optimistic_adam_v2": "optax:optimistic_adam_v2",
    "optimistic_gradient_descent": "optax:optimistic_gradient_descent",
    "prodigy": "optax.contrib:prodigy",
    "radam": "optax:radam",
    "rmsprop": "optax:rmsprop",
    "sgd": "optax:sgd",
    "sign_sgd": "optax:sign_sgd",
    "signum": "optax:signum",
    "simplified_ademamix": "optax.contrib:simplified_ademamix",
    "sm3": "optax:sm3",
    "yogi": "optax:yogi",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a slot of the config takes: where its names are listed, and what the system itself supplies."""

    word: str
    table: Mapping[str, str]
    supplied: tuple[str, ...] = ()
    own: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)  # jaxtrain's, legal whatever the
    # builder: option → (annotation, default)


MODEL = Kind("model", MODELS, ("rngs", "num_classes", "input_shape", "dtype"))
TASK = Kind("task", TASKS, ("num_classes", "dtype"))
DATASET = Kind("data set", DATASETS, own={"resident": (Literal["auto", "yes", "no"], "auto")})
AUGMENTATION = Kind("augmentation", AUGMENTATIONS)
SCHEDULE = Kind("schedule", SCHEDULES, ("total_steps", "steps_of"))
STEP = Kind("step", STEPS, ("parts", "spec", "num_classes", "augment", "preprocess", "optimizer", "dtype"))
INITIALISER = Kind("initialiser", INITIALISERS, own={"paths": (str, EMPTY)})
TEST_TIME = Kind("test-time augmentation", TEST_TIMES)
OPTIMIZER = Kind(
    "optimizer",
    OPTIMIZERS,
    # Masks come from config.decay_rules; a second rate or decay beside the scheduled ones would escape the
    # schedule.
    ("mask", "weight_decay_mask", "trust_ratio_mask", "weight_decay_rate", "adam_learning_rate", "dtype"),
    own={"learning_rate": (float, EMPTY), "weight_decay": (float, 0.0)},
)
OF_A_GROUP: dict[str, tuple[Any, Any]] = {
    "paths": (str, EMPTY),
    "schedule": (dict | str, ""),
    "since": (str, ""),
    "until": (str, ""),
}
PARAM_GROUP = dataclasses.replace(OPTIMIZER, own={**OPTIMIZER.own, **OF_A_GROUP})


def nearest(name: str, choices: Iterable[str]) -> str:
    """The choice that `name` was probably meant to be, also by its initials; "" where none is near."""
    folded = {choice.lower(): choice for choice in choices}
    wanted = str(name).lower()
    found = [each for each in folded if _initials(each) == wanted and not each.startswith(wanted)]  # lr, wd
    found = found or difflib.get_close_matches(wanted, folded, 1, 0.6)
    return folded[found[0]] if found else ""


def _initials(name: str) -> str:
    """The first letters of the words of a name."""
    return "".join(word[:1] for word in name.split("_"))


def choices_hint(name: str, choices: Iterable[str]) -> str:
    """The end of an error line: " Did you mean 'x'? Known: a, b, x."."""
    known = sorted(choices)
    near = nearest(name, known)
    return (f" Did you mean {near!r}?" if near else "") + f" Known: {', '.join(known) or 'none'}."


def resolve(name: str, table: Mapping[str, str], kind: str) -> Callable[..., Any]:
    """The builder behind a name of the table, or behind a user's "package.module:attribute".

    Raises UserError for a name that is in neither, a module that cannot be imported, an attribute that is not
    there or not callable.
    """
    target = table.get(name, name) if isinstance(name, str) else ""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        own = "or your own 'package.module:function'"
        raise UserError(f"unknown {kind} {name!r}.{choices_hint(name, table).removesuffix('.')}; {own}.")
    found = getattr(_module(module, f"{kind} {name!r}"), attribute, None)
    if found is None:
        public = [each for each in vars(importlib.import_module(module)) if not each.startswith("_")]
        near = nearest(attribute, public)
        hint = f"; did you mean {module + ':' + near!r}?" if near else ""
        raise UserError(f"{kind} {name!r}: module {module} has no {attribute!r}{hint}")
    if not callable(found):
        raise UserError(f"{kind} {name!r} is {type(found).__name__}, not something to call")
    return found


def parameters(builder: Callable[..., Any]) -> Options:
    """What can be passed to a builder, by name. `inspect.signature` does not see through Flax NNX's metaclass."""
    function = _function(builder)
    found = list(inspect.signature(function).parameters.values())
    return {each.name: each for each in (found if function is builder else found[1:])}  # without self


def options(builder: Callable[..., Any], supplied: Iterable[str] = ()) -> Options:
    """The parameters of a builder that a config may set, by name, each with the annotation a config can hold.

    A parameter of kind VAR_KEYWORD among them means that the builder takes any option.
    """
    function = _function(builder)
    skipped = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    found = {}
    for each in parameters(builder).values():
        if each.name in supplied or each.kind in skipped:
            continue
        annotation = schema.settable(_evaluated(each, function), each.default)
        if annotation is not None:
            found[each.name] = each.replace(annotation=annotation)
    return found


def options_of(kind: Kind, name: str) -> Options:
    """The legal options of a part, among them those that its kind always has.

    An optimizer's learning rate and weight decay are ours: what its builder calls them does not count.
    """
    builder = resolve(name, kind.table, kind.word)
    supplied = (*kind.supplied, "name")  # a part says by its name which builder it is
    named = parameters(builder)
    rate = list(named)[:1] if "learning_rate" in kind.own else []  # comes first, whatever its name
    found = options(builder, (*supplied, *rate))
    for own, (annotation, default) in kind.own.items():
        given = named[own].default if own in named else EMPTY
        default = given if isinstance(given, (int, float)) else default
        found[own] = inspect.Parameter(own, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return found


def split(part: Part) -> tuple[str, dict[str, Any]]:
    """A part's name and its options. Raises UserError where there is no name."""
    if isinstance(part, str):
        return part, {}
    if not isinstance(part, (Mapping, ConfigDict)) or not isinstance(part.get("name"), str):
        raise UserError(f"{part!r} is no part; write a name, or dict(name=..., option=...)".replace("\n", " "))
    return part["name"], {key: part[key] for key in part if key != "name"}


def checked(part: Part, kind: Kind, where: str, *, fill: bool = True) -> dict[str, Any]:
    """The part as dict(name=..., **options), typed; with `fill`, unwritten options at their defaults.

    `where` is how an error names the part ("config.model"). Raises UserError for an unknown name or option, a
    value of another type, or an option that is missing.
    """
    name, given = split(part)
    return {"name": name} | conformed(given, options_of(kind, name), f"{kind.word} {name!r}", where, fill=fill)


def conformed(
    given: Mapping[str, Any], legal: Options, who: str, where: str, *, fill: bool = False, text: bool = False
) -> dict[str, Any]:
    """Options checked against a signature, see `checked`; with `text`, values are command-line texts."""
    values = {key: conformed_one(key, value, legal, who, where, text=text) for key, value in given.items()}
    for key, each in legal.items():
        if key in values or each.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if each.default is EMPTY:
            raise UserError(f"{who} needs {key}: set {where}.{key} ({schema.describe(each.annotation)})")
        if fill and _is_plain(each.default):
            values[key] = schema.plain(each.default)
    return values


def conformed_one(key: str, value: Any, legal: Options, who: str, where: str, *, text: bool = False) -> Any:
    """One option's value as its parameter wants it. Raises UserError for an unknown option or type."""
    named = {each: one for each, one in legal.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    if key not in named and len(named) == len(legal):
        raise UserError(f"{who} has no option {key!r} ({where}.{key}).{choices_hint(key, named)}")
    annotation = named[key].annotation if key in named else Any
    try:
        return schema.parse(value, annotation) if text else schema.conform(value, annotation)
    except schema.Mismatch as wanted:
        raise UserError(f"{where}.{key} is {value!r}; {who} takes {wanted}") from None


def build(part: Part, table: Mapping[str, str], kind: str, **supplied: Any) -> Any:
    """Calls the part's builder with its options and with those of `supplied` that its signature names.

    Raises UserError as `checked` does.
    """
    name, given = split(part)
    builder = resolve(name, table, kind)
    values = conformed(given, options(builder, supplied), f"{kind} {name!r}", kind)
    named = parameters(builder)
    return builder(**values, **{key: value for key, value in supplied.items() if key in named})


def build_of(kind: Kind, part: Part, **supplied: Any) -> Any:
    """`build` of a part of that kind, without the options that are jaxtrain's own."""
    name, given = split(part)
    own = {key for key in kind.own if key not in parameters(resolve(name, kind.table, kind.word))}
    return build({"name": name} | {k: v for k, v in given.items() if k not in own}, kind.table, kind.word, **supplied)


def matching(key: str, pattern: str, paths: Sequence[str]) -> list[str]:
    """Those of the parameters' paths in which a regular expression is found; UserError where it is none, or in none."""
    try:
        matched = [path for path in paths if re.search(pattern, path)]
    except re.error as error:
        raise UserError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
    if not matched:
        some = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
        raise UserError(f"{key}: {pattern!r} matches no parameter. There are {some}")
    return matched


def described(error: BaseException) -> str:
    """An error as "Type: text (file line n)", in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _module(name: str, who: str) -> Any:
    try:
        return importlib.import_module(name)
    except JaxtrainError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            reason = f"there is no module {error.name!r} in this folder or among the installed packages"
            raise UserError(f"{who}: {reason}") from None
        raise UserError(f"{who}: importing {name} failed with {described(error)}") from error


def _function(builder: Any) -> Callable[..., Any]:
    """What takes the builder's arguments: of a class its __init__, where it has one, not its metaclass."""
    return builder.__init__ if inspect.isclass(builder) and builder.__init__ is not object.__init__ else builder


def _evaluated(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """The annotation itself where `from __future__ import annotations` left its text."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    names = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return eval(parameter.annotation, dict(names))
    except Exception:  # a name that only type checkers see: the default still tells the type
        return EMPTY


def _is_plain(value: Any) -> bool:
    try:
        schema.plain(value)
    except schema.Mismatch:
        return False
    return True
