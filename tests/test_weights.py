"""PyTorch's weights: read without running anything, named one to one, and the same logits as PyTorch's own."""

import collections
import functools
import io
import json
import os
import pickle
import struct
import types
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from conftest import QUICK

from jaxtrain import export, train
from jaxtrain.adapters.functional import named, nested
from jaxtrain.errors import UserError
from jaxtrain.initialise import initialised
from jaxtrain.model import build_model
from jaxtrain.result import Trained
from jaxtrain.weights import families, files, hub
from jaxtrain.weights.names import exported, imported

VIT = dict(name="vit", size="Ti", patch=8, width=16, depth=2, heads=2)
GPT = dict(name="gpt", width=16, depth=2, heads=2, context=32)
LLAMA = dict(name="llama", width=16, depth=2, heads=4, kv_heads=2, hidden=40)
SMALL = {  # models of each family as small as they go, on pictures of 32×32, and the formats that know them
    "resnet": (dict(name="resnet", depth=18, width=8, stem="imagenet"), ["torchvision", "timm"]),
    "bottleneck": (dict(name="resnet", depth=50, width=8, stem="imagenet"), ["torchvision"]),
    "convnext": (dict(name="convnext", width=8, blocks=(1, 2, 1), layer_scale=1.0), ["torchvision", "timm", "hf"]),
    "vit": (VIT, ["timm", "torchvision", "hf"]),
    "vit, mean": (VIT | dict(pool="mean"), ["timm"]),
    "vit, map": (VIT | dict(pool="map"), ["timm"]),
    "vit, scan": (VIT | dict(scan=True), ["timm", "torchvision", "hf"]),
    "gpt": (GPT, ["hf", "hf-bare"]),
    "gpt, scan": (GPT | dict(scan=True), ["hf", "hf-bare"]),
    "llama": (LLAMA | dict(epsilon=1e-6), ["hf"]),
    "llama, scan, tied": (LLAMA | dict(scan=True, tied=True), ["hf"]),
    "llama, qk_norm": (LLAMA | dict(qk_norm=True, epsilon=1e-6), ["hf"]),
}
CASES = [(name, format) for name, (_, formats) in SMALL.items() for format in formats]


def model_of(part, classes=10):
    return build_model(part, num_classes=classes, input_shape=(32, 32, 3), dtype=jnp.float32)


def random_weights(part):
    """By name, of a size that lets every layer matter."""
    rng = np.random.default_rng(0)
    return {
        name: (0.1 * rng.normal(size=array.shape) + (name.endswith(("var", "scale")))).astype(np.float32)
        ** (2 if name.endswith("var") else 1)
        for name, array in abstract(tuple(part.items())).items()
    }


@functools.cache
def abstract(part):
    params, state = jax.eval_shape(model_of(dict(part)).init, jax.random.key(0), None)
    return named({"params": params, "model_state": state})


def of_format(part, format):
    return families.formats(part["name"])[format]


@pytest.mark.parametrize(("name", "format"), CASES)
def test_a_map_is_one_to_one_and_backwards_the_same(name, format, tmp_path):
    part = SMALL[name][0]
    ours = random_weights(part)
    entries = of_format(part, format).entries(ours)
    assert len({(entry.theirs, entry.part) for entry in entries}) == len(entries)
    assert {entry.ours for entry in entries} == ours.keys()
    theirs = exported(entries, ours)
    assert families.matching(part["name"], ours, theirs)[1] == entries
    files.write(tmp_path / "x.safetensors", theirs)
    back = imported(entries, files.read(tmp_path / "x.safetensors"))
    assert back.keys() == ours.keys() and all((back[key] == ours[key]).all() for key in ours)


@pytest.mark.parametrize("name", ["vit", "gpt", "llama"])
def test_stacked_layers_are_the_numbered_ones(name):
    """Whatever `scan` says, the file is the same."""
    part = SMALL[name][0]
    ours = random_weights(part | dict(scan=True))
    library = of_format(part, SMALL[name][1][0])
    theirs = exported(library.entries(ours), ours)
    unrolled = imported(library.entries(random_weights(part)), theirs)
    assert unrolled.keys() == random_weights(part).keys() and len(unrolled) > len(ours)
    for key, array in ours.items():
        if "blocks/" not in key:
            assert (unrolled[key] == array).all()
            continue
        for layer, each in enumerate(array):
            assert (unrolled[key.replace("blocks/", f"blocks/{layer}/")] == each).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_, np.float64])
def test_safetensors_are_what_they_were(dtype, tmp_path):
    tensors = {"a": np.arange(6).reshape(2, 3).astype(dtype), "scalar": np.array(1, dtype), "none": np.zeros(0, dtype)}
    files.write(tmp_path / "x.safetensors", tensors)
    found = files.read(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and (found[name] == tensor).all()


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


FLOAT = dict(dtype="F32", shape=[2])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        header(a=FLOAT | {"data_offsets": [0, 8]}),
        header(a=FLOAT | {"data_offsets": [-8, 0]}) + bytes(8),
        header(a=FLOAT | {"shape": [3], "data_offsets": [0, 8]}) + bytes(8),
        header(a=FLOAT | {"dtype": "F4", "data_offsets": [0, 8]}) + bytes(8),
        struct.pack("<Q", 4) + b"oops",
    ],
    ids=["empty", "endless", "short", "before", "shape", "dtype", "no json"],
)
def test_damaged_safetensors_cost_one_line(content, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.safetensors cannot be read as weights") as error:
        files.read(tmp_path / "x.safetensors")
    assert "\n" not in str(error.value)


class Harmful:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def torch_file(path, content, storages=()):
    """What `torch.save` writes, written without PyTorch."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content if isinstance(content, bytes) else pickle.dumps(content, 2))
        for key, array in enumerate(storages):
            archive.writestr(f"archive/data/{key}", array.tobytes())


def tensor_pickle(name, count, offset, shape, strides):
    """A state_dict of one tensor, as PyTorch pickles it."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing):
            return thing if isinstance(thing, tuple) and thing[:1] == ("storage",) else None

    text = io.BytesIO()
    Pickler(text, 2).dump(collections.OrderedDict({name: ("storage", "TYPE", "0", "cpu", count)}))
    # By hand: the names of PyTorch's functions, which are not here to be pickled.
    body = (
        b"\x80\x02ccollections\nOrderedDict\n)R(" + pickle.dumps(name, 2)[2:-1] + b"ctorch._utils\n_rebuild_tensor_v2\n"
        b"(("
        + pickle.dumps("storage", 2)[2:-1]
        + b"ctorch\nFloatStorage\n"
        + pickle.dumps("0", 2)[2:-1]
        + pickle.dumps("cpu", 2)[2:-1]
        + pickle.dumps(count, 2)[2:-1]
        + b"tQ"
        + pickle.dumps(offset, 2)[2:-1]
        + pickle.dumps(shape, 2)[2:-1]
        + pickle.dumps(strides, 2)[2:-1]
        + b"\x89ccollections\nOrderedDict\n)RtRu."
    )
    return body


def test_a_tensor_of_torch_save_is_laid_over_its_storage(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    torch_file(tmp_path / "x.pt", tensor_pickle("w", 12, 2, (2, 3), (1, 3)), [numbers])
    assert (files.read(tmp_path / "x.pt")["w"] == numbers[2:].reshape(-1)[[[0, 3, 6], [1, 4, 7]]]).all()
    torch_file(tmp_path / "x.pt", tensor_pickle("w", 12, 8, (2, 3), (1, 3)), [numbers])
    with pytest.raises(UserError, match="outside of its 12 numbers"):
        files.read(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "harm",
    [
        Harmful(os.system, "touch harmed"),
        Harmful(eval, "__import__('os').system('touch harmed')"),
        {"w": Harmful(exec, "open('harmed', 'w')")},
        Harmful(io.open, "harmed", "w"),
    ],
    ids=["system", "eval", "inside", "open"],
)
def test_nothing_in_a_pickle_is_run(harm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch_file(tmp_path / "x.pt", harm)
    with pytest.raises(UserError, match="nothing in a file is run; save the state_dict alone") as error:
        files.read(tmp_path / "x.pt")
    assert "\n" not in str(error.value) and not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.pt", b"\x80\x02}.", "since 1.6"),
        ("x.npz", b"", "no file of weights by its name"),
        ("y.pt", None, "there is no file"),
    ],
    ids=["old", "suffix", "absent"],
)
def test_what_is_no_file_of_weights(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        files.read(tmp_path / name)


def in_shards(folder, weight_map):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_weights_in_several_files_are_those_of_one(tmp_path):
    tensors = {name: np.full(3, number, np.float32) for number, name in enumerate("abc")}
    files.write(tmp_path / "1.safetensors", {name: tensors[name] for name in "ab"})
    files.write(tmp_path / "2.safetensors", {"c": tensors["c"]})
    index = in_shards(tmp_path, dict(a="1.safetensors", b="1.safetensors", c="2.safetensors"))
    found = files.read(index)
    assert found.keys() == tensors.keys() and all((found[name] == tensors[name]).all() for name in tensors)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (dict(a="1.safetensors", b="1.safetensors"), "there is no b in 1.safetensors.* download all of the"),
        (dict(a="1.safetensors", b="2.safetensors"), "there is no file .*2.safetensors"),
        (dict(a="../1.safetensors"), "expected files of weights that lie beside it"),
        (dict(a="/etc/passwd"), "expected files of weights that lie beside it"),
        (dict(a="model.safetensors.index.json"), "expected files of weights that lie beside it"),
        (dict(a=1), "expected files of weights that lie beside it"),
        (["a"], "is no index of weights"),
        ("oops", "is no index of weights"),
    ],
    ids=["tensor", "file", "above", "elsewhere", "itself", "number", "list", "no json"],
)
def test_a_bad_index_costs_one_line(content, words, tmp_path):
    files.write(tmp_path / "1.safetensors", {"a": np.zeros(3, np.float32)})
    index = in_shards(tmp_path, content)
    if content == "oops":
        index.write_text(content)
    with pytest.raises(UserError, match=words) as error:
        files.read(index)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("address", ["hf://nobody", "hf://a/b/../../c d"])
def test_addresses(address):
    with pytest.raises(UserError, match="expected hf://owner/name"):
        hub.fetched(address)


def test_the_hub_s_cache_is_enough(tmp_path, monkeypatch):
    """Offline, with the real library: what was downloaded before is found; what was not costs one line."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    revision = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "models--me--net" / "snapshots" / revision / "model.safetensors"
    for path, text in ((kept, "weights"), (tmp_path / "models--me--net" / "refs" / "main", revision)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    large = tmp_path / "models--me--large"
    (large / "refs").mkdir(parents=True)
    (large / "refs" / "main").write_text(revision)
    (large / "snapshots" / revision).mkdir(parents=True)
    index = in_shards(large / "snapshots" / revision, dict(a="1.safetensors"))
    with pytest.raises(UserError, match="hf://me/large: .* is not in the cache"):  # its one file is not
        hub.fetched("hf://me/large")
    files.write(index.with_name("1.safetensors"), {"a": np.zeros(3, np.float32)})
    assert hub.fetched("hf://me/large") == index and files.read(index).keys() == {"a"}
    assert hub.fetched("hf://me/net") == hub.fetched("hf://me/net/model.safetensors") == kept
    with pytest.raises(
        UserError, match="hf://me/other: model.safetensors is not in the cache.*or give a file"
    ) as error:
        hub.fetched("hf://me/other")
    assert "\n" not in str(error.value)


def config(part, **changes):
    changes = dict(total="1st", test="no", eval_every="", devices=1, batch_size=4) | changes
    return tiny.config(model=part, **changes)


def pictures(side=32, classes=10):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (40, side, side, 3), np.uint8), np.arange(40) % classes


@pytest.fixture
def weights(tmp_path):
    """A ViT's weights as timm would name them, and what they are here."""
    ours = random_weights(VIT)
    theirs = exported(families.VIT_TIMM.entries(ours), ours)
    files.write(tmp_path / "vit.safetensors", theirs)
    return tmp_path / "vit.safetensors", ours, theirs


FROZEN = dict(optimizer=dict(name="sgd", learning_rate=1e-30), schedule=dict(name="constant"))


def test_a_run_begins_with_them_and_exports_them(weights, tmp_path, capsys):
    path, ours, theirs = weights
    run, written = tmp_path / "run", tmp_path / "out.safetensors"
    result = train.run(config(VIT | dict(scan=True), init_from=str(path), **FROZEN), run, data=pictures())
    found = named(result.params)
    assert all((leaf == ours[f"params/{name}"]).all() for name, leaf in found.items() if "blocks" not in name)
    assert export.main([f"--workdir={run}", f"--output={written}"]) == 0
    assert f"{len(theirs)} tensors" in capsys.readouterr().out
    again = files.read(written)
    assert again.keys() == theirs.keys() and all((again[name] == theirs[name]).all() for name in theirs)
    for flags, code, words in [
        (["--output=x.safetensors"], 2, "no workdir given"),
        ([f"--workdir={run}"], 2, "no output given"),
        ([f"--workdir={run}", "--output=x.pt"], 2, "write x.pt.safetensors"),
        ([f"--workdir={run}", f"--output={written}", "--frmat=hf"], 2, "Did you mean '--format'"),
        ([f"--workdir={run}", f"--output={written}", "--format=tim"], 2, "Did you mean 'timm'"),
        ([f"--workdir={tmp_path}", f"--output={written}"], 2, "is not a workdir"),
        ([f"--workdir={run}", "--output=/nowhere/x.safetensors"], 5, "cannot write /nowhere/x.safetensors"),
    ]:
        assert export.main(flags) == code
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("jaxtrain:")]
        assert words in line


@pytest.mark.parametrize(
    ("part", "format", "words"),
    [
        (dict(name="mlp"), "", ["no map", "'mlp'", "vit"]),
        (VIT | dict(registers=2), "", ["timm has no name for params/registers"]),
        (VIT | dict(pool="mean"), "hf", ["Hugging Face has no such model without cls"]),
        (GPT | dict(rope=1e4), "", ["without positions"]),
        (GPT | dict(bias=False), "", ["without attention/query/bias"]),
        (GPT | dict(kv_heads=1), "", ["c_attn", "3 equal parts"]),
        (GPT | dict(feed="swiglu"), "", ["no name for params/stack/blocks/0/feed/gate/"]),
    ],
    ids=["no map", "registers", "no cls", "no positions", "no biases", "key heads", "gate"],
)
def test_what_pytorch_has_not_is_not_exported(part, format, words):
    job = train.build(config(dict(name="mlp")), data=pictures())
    with job.config.unlocked():
        job.config.model = part
    weights = {} if part["name"] == "mlp" else random_weights(part)
    state = types.SimpleNamespace(**nested(weights) if weights else {"params": {}})
    with pytest.raises(UserError) as error:
        export.exported(Trained(job, state), format)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_new_head_and_other_positions_are_asked_for(weights):
    path, ours, _ = weights
    given = dict(init_from=str(path), **FROZEN)
    with pytest.raises(UserError, match=r"head/.*config\.init_head='new'"):
        train.run(config(VIT, **given), data=pictures(classes=4))
    with pytest.raises(UserError, match=r"positions.*config\.init_positions='resample'"):
        train.run(config(VIT, **given), data=pictures(side=48))
    result = train.run(config(VIT, **given, init_head="new", init_positions="resample"), data=pictures(48, classes=4))
    params = named(result.params)
    assert params["head/kernel"].shape == (16, 4) and params["positions"].shape == (1, 37, 16)
    np.testing.assert_allclose(params["positions"][:, 0], ours["params/positions"][:, 0], rtol=1e-6)
    assert (params["embed/kernel"] == ours["params/embed/kernel"]).all()


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        (lambda found: found.pop("norm.bias"), VIT, ["params/norm/bias is missing"]),
        (lambda found: found.update(extra=found["norm.bias"]), VIT, ["extra is not in this model"]),
        (lambda found: found.update({"norm.bias": np.zeros(3, np.float32)}), VIT, ["norm/bias", "[3]", "[16]"]),
        (lambda found: found, dict(name="mlp"), ["no map", "'mlp'", "vit"]),
        (lambda found: found.pop("blocks.1.norm1.bias"), VIT | dict(scan=True), ["attention_norm/bias is missing"]),
        (
            lambda found: found.update({"blocks.1.norm1.bias": np.zeros(3, np.float32)}),
            VIT | dict(scan=True),
            ["blocks/attention_norm/bias holds all layers", "[3] and [16]", "scan=False"],
        ),
        (lambda found: found, VIT | dict(scan=True, depth=1), ["blocks.1.", "is not in this model"]),
    ],
    ids=["missing", "superfluous", "mismatched", "no family", "no layer", "uneven layers", "a layer too many"],
)
def test_what_does_not_fit_is_named(change, part, words, weights):
    path, _, theirs = weights
    change(theirs)
    files.write(path, theirs)
    job = train.build(config(part, init_from=str(path)), data=pictures())
    with pytest.raises(UserError) as error:
        initialised(job, job.abstract, print)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_tied_head_may_be_there_twice(tmp_path):
    part = LLAMA | dict(tied=True)
    ours = random_weights(part)
    theirs = exported(families.LLAMA.entries(ours), ours)
    tokens = dict(name="text", files=str(tmp_path / "x.txt"), window=8)
    (tmp_path / "x.txt").write_text("To be, or not to be. " * 40)
    changes = dict(data=tokens, task="language_modelling", init_from=str(tmp_path / "x.safetensors"))
    job = train.build(config(part, **changes))
    embedding = np.zeros((256, 16), np.float32)
    for head, words in ((embedding, ""), (embedding + 1, "lm_head.weight is not in this model")):
        files.write(
            tmp_path / "x.safetensors", theirs | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        )
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), job.abstract)
        if words:
            with pytest.raises(UserError, match=words):
                initialised(job, state, print)
        else:
            assert not initialised(job, state, print).params["embedding"]["embedding"].any()


# Against PyTorch's own. None of these libraries is needed by jaxtrain, or installed with its tests.


def resnet18(library):
    if library == "timm":
        timm = pytest.importorskip("timm", reason="parity with timm needs timm")
        kind = timm.models.resnet
        return kind.ResNet(kind.BasicBlock, [2, 2, 2, 2], num_classes=10), dict(name="resnet", stem="imagenet")
    torchvision = pytest.importorskip("torchvision", reason="parity with torchvision needs torchvision")
    kind = torchvision.models.resnet
    return kind.ResNet(kind.BasicBlock, [2, 2, 2, 2], num_classes=10), dict(name="resnet", stem="imagenet")


def resnet50(library):
    torchvision = pytest.importorskip("torchvision", reason="parity with torchvision needs torchvision")
    kind = torchvision.models.resnet
    return kind.ResNet(kind.Bottleneck, [3, 4, 6, 3], num_classes=10), dict(name="resnet", depth=50, stem="imagenet")


def convnext(library):
    part = dict(name="convnext", width=8, blocks=(1, 1, 2, 1))
    if library == "timm":
        timm = pytest.importorskip("timm", reason="parity with timm needs timm")
        return timm.models.convnext.ConvNeXt(depths=part["blocks"], dims=(8, 16, 32, 64), num_classes=10), part
    if library == "hf":
        transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
        sizes = dict(hidden_sizes=[8, 16, 32, 64], depths=part["blocks"], num_labels=10)
        return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes)), part
    torchvision = pytest.importorskip("torchvision", reason="parity with torchvision needs torchvision")
    kind = torchvision.models.convnext
    stages = [(8, 16, 1), (16, 32, 1), (32, 64, 2), (64, None, 1)]
    return kind.ConvNeXt([kind.CNBlockConfig(*each) for each in stages], num_classes=10), part


def vit(library, pool="cls", **part):
    if library == "hf":
        transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
        sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        about = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
        return transformers.ViTForImageClassification(about), VIT | part
    if library == "torchvision":
        torchvision = pytest.importorskip("torchvision", reason="parity with torchvision needs torchvision")
        return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 64, num_classes=10), VIT | part
    timm = pytest.importorskip("timm", reason="parity with timm needs timm")
    sizes = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=10)
    pooled = dict(global_pool={"cls": "token", "mean": "avg"}.get(pool, pool), class_token=pool == "cls", fc_norm=False)
    return timm.models.vision_transformer.VisionTransformer(**sizes, **pooled), VIT | part | dict(pool=pool)


def gpt2(library, **part):
    transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
    about = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=10, n_positions=32)
    return transformers.GPT2LMHeadModel(about), GPT | part


def llama(library, **part):
    transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
    kind = "Qwen3" if part.get("qk_norm") else "Llama"
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=10)
    about = getattr(transformers, f"{kind}Config")(
        **sizes,
        head_dim=4,
        intermediate_size=40,
        rms_norm_eps=part.get("epsilon", 1e-5),
        rope_theta=10000.0,
        tie_word_embeddings=part.get("tied", False),
    )
    return getattr(transformers, f"{kind}ForCausalLM")(about), LLAMA | part


PARITY = [
    (resnet18, "torchvision", {}),
    (resnet18, "timm", {}),
    (resnet50, "torchvision", {}),
    (convnext, "torchvision", {}),
    (convnext, "timm", {}),
    (convnext, "hf", {}),
    (vit, "timm", {}),
    (vit, "timm", dict(scan=True)),
    (vit, "timm", dict(pool="mean")),
    (vit, "timm", dict(pool="map")),
    (vit, "torchvision", {}),
    (vit, "hf", dict(epsilon=1e-12)),
    (gpt2, "hf", {}),
    (gpt2, "hf", dict(scan=True)),
    (llama, "hf", {}),
    (llama, "hf", dict(epsilon=1e-6)),
    (llama, "hf", dict(scan=True, tied=True)),
    (llama, "hf", dict(qk_norm=True, epsilon=1e-6)),
]


def labelled(*case):
    make, library, part = case
    return pytest.param(*case, id=" ".join([make.__name__, library, *(f"{key}={part[key]}" for key in part)]))


@pytest.fixture
def torch():
    found = pytest.importorskip("torch", reason="parity with PyTorch needs torch, which jaxtrain does not")
    found.manual_seed(0)
    return found


def shaken(torch, net):
    """The net, everything in it a little off its initial value, so that every tensor matters."""
    with torch.no_grad():
        for key, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand_like(tensor) if key.endswith("var") else torch.randn_like(tensor)
                tensor.add_(noise * (0.02 if tensor.ndim < 4 else 0.001))
    return net


def published(torch, net, folder, tensors=None):
    """The file that others would publish, and its tensors: of Hugging Face, under other names than the net's own."""
    if hasattr(net, "save_pretrained"):
        net.save_pretrained(folder)
    else:
        pytest.importorskip("safetensors.torch", reason="writes the file as others do").save_file(
            tensors or net.state_dict(), folder / "model.safetensors"
        )
    return folder / "model.safetensors"


def example(part):
    """Inputs, and the labels of a loss."""
    rng = np.random.default_rng(0)
    if part["name"] in ("gpt", "llama"):
        return rng.integers(0, 10, (4, 12)), rng.integers(0, 10, (4, 12))
    return rng.normal(size=(4, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, 4)


def of_torch(torch, net, inputs):
    found = net(torch.from_numpy(inputs) if inputs.ndim == 2 else torch.from_numpy(inputs).permute(0, 3, 1, 2))
    return getattr(found, "logits", found)


def gradients_of_torch(torch, net, inputs, labels, folder):
    """By the names that are published. The net's weights are its gradients from then on."""
    logits = of_torch(torch, net, inputs)
    torch.nn.functional.cross_entropy(logits.reshape(-1, 10), torch.from_numpy(labels).reshape(-1)).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter.grad)
    folder.mkdir()
    return files.read(published(torch, net, folder, {key: each.detach() for key, each in net.named_parameters()}))


def ours_and_gradients(part, tree, inputs, labels, train=False):
    """Logits, the model's state after them, and the gradient of the mean cross-entropy by name."""

    def loss(params):
        key, state = jax.random.key(0), jax.tree.map(jnp.asarray, tree.get("model_state", {}))
        logits, state = model_of(part).apply(params, state, jnp.asarray(inputs), key=key, train=train)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -chosen.mean(), (logits, state)

    with jax.default_matmul_precision("highest"):
        gradients, (logits, state) = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)(tree["params"])
    return np.asarray(logits), state, named({"params": jax.device_get(gradients)})


def refuse_far(ours, theirs, most):
    """Each gradient is that of PyTorch, up to a share of its largest number.

    A bias of keys moves all logits of a softmax alike: its gradient is zero, and what is there is rounding.
    """
    assert ours.keys() == {name for name in theirs if name.startswith("params/")}
    least = 1e-4 * max(np.abs(each).max() for each in theirs.values())
    apart = {name: np.abs(ours[name] - theirs[name]).max() / max(np.abs(theirs[name]).max(), least) for name in ours}
    worst = max(apart, key=apart.get)
    print(f"gradients apart by {apart[worst]:.1e} at most, in {worst}")
    assert apart[worst] < most, (worst, apart[worst])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "library", "part"), [labelled(*case) for case in PARITY])
def test_logits_and_gradients_are_those_of_pytorch(make, library, part, torch, tmp_path):
    net, part = make(library, **part)
    net = shaken(torch, net).eval()
    tensors = files.read(published(torch, net, tmp_path))
    entries = of_format(part, library).entries(random_weights(part))
    tree = nested(imported(entries, tensors))
    inputs, labels = example(part)
    expected = of_torch(torch, net, inputs).detach().numpy()
    found, _, gradients = ours_and_gradients(part, tree, inputs, labels)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-4)
    again = exported(entries, named(tree))
    assert all((again[key] == tensors[key]).all() for key in again)
    theirs = imported(entries, gradients_of_torch(torch, net, inputs, labels, tmp_path / "gradients"))
    refuse_far(gradients, theirs, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "library", "part"), [labelled(*case) for case in PARITY])
def test_pytorch_takes_what_is_exported(make, library, part, torch, tmp_path):
    net, part = make(library, **part)
    ours = random_weights(part)
    files.write(tmp_path / "model.safetensors", exported(of_format(part, library).entries(ours), ours))
    if hasattr(net, "save_pretrained"):
        net.config.save_pretrained(tmp_path)
        net, about = type(net).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(about.values()), about
    else:
        load = pytest.importorskip("safetensors.torch", reason="reads the file as others do").load_file
        net.load_state_dict(load(tmp_path / "model.safetensors"), strict=True)
    tree, (inputs, labels) = nested(ours), example(part)
    expected = of_torch(torch, net.eval(), inputs).detach().numpy()
    found, *_ = ours_and_gradients(part, tree, inputs, labels)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_batch_normalisation_learns_as_in_pytorch(torch, tmp_path):
    """In train mode too; but PyTorch keeps the unbiased variance, of n - 1, for evaluation."""
    net, part = resnet18("torchvision")
    net = shaken(torch, net).train()
    tensors = files.read(published(torch, net, tmp_path))
    entries = families.RESNET.entries(random_weights(part))
    tree = nested(imported(entries, tensors))
    inputs, labels = example(part)
    inputs = np.random.default_rng(1).normal(size=(8, 64, 64, 3)).astype(np.float32)
    labels = np.concatenate([labels, labels])
    _, state, gradients = ours_and_gradients(part, tree, inputs, labels, train=True)
    theirs = imported(entries, gradients_of_torch(torch, net, inputs, labels, tmp_path / "gradients"))
    refuse_far(gradients, theirs, 1e-3)
    mean, var = (net.bn1.get_buffer(f"running_{name}").numpy() for name in ("mean", "var"))
    np.testing.assert_allclose(state["stem"]["norm"]["mean"], mean, rtol=1e-4, atol=1e-5)
    count = 8 * 32 * 32
    old = np.asarray(tree["model_state"]["stem"]["norm"]["var"])
    np.testing.assert_allclose((state["stem"]["norm"]["var"] - 0.9 * old) * count / (count - 1) + 0.9 * old, var, 1e-4)


@pytest.mark.slow
def test_what_torch_saves_is_read(torch, tmp_path):
    net, part = gpt2("hf")
    own = net.state_dict()
    torch.save({"state_dict": own, "epoch": 3}, tmp_path / "model.pt")
    found = files.read(tmp_path / "model.pt")
    assert found.keys() == own.keys() and all((found[name] == own[name].numpy()).all() for name in own)
