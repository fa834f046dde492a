"""PyTorch's weights: read without running anything, named one to one, and the same logits as PyTorch's own."""

import collections
import io
import json
import os
import pickle
import struct
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from jaxtrain import train
from jaxtrain.adapters.functional import named, nested
from jaxtrain.errors import UserError
from jaxtrain.model import build_model
from jaxtrain.weights import families, files, hub
from jaxtrain.weights.names import exported, imported

SMALL = {  # a model of each family as small as it goes, on pictures of 32×32
    "resnet": dict(name="resnet", depth=18, width=8, stem="imagenet"),
    "bottleneck": dict(name="resnet", depth=50, width=8, stem="imagenet"),
    "vit": dict(name="vit", size="Ti", patch=8, width=16, depth=2, heads=2),
    "gpt": dict(name="gpt", width=16, depth=2, heads=2, context=32),
    "llama": dict(name="llama", width=16, depth=2, heads=4, kv_heads=2, hidden=40),
}
CASES = [(name, library) for name, part in SMALL.items() for library in families.FAMILIES[part["name"]]]


def built(name, classes=10, side=32):
    model = build_model(SMALL[name], num_classes=classes, input_shape=(side, side, 3), dtype=jnp.float32)
    params, state = model.init(jax.random.key(0), None)
    return model, named({"params": params, "model_state": state})


def random_like(arrays, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.normal(size=array.shape) + (name.endswith(("var", "scale")))).astype(np.float32)
        ** (2 if name.endswith("var") else 1)
        for name, array in arrays.items()
    }


@pytest.mark.parametrize(("name", "library"), CASES, ids=lambda value: getattr(value, "library", value))
def test_a_map_is_one_to_one_and_backwards_the_same(name, library, tmp_path):
    _, ours = built(name)
    ours = random_like(ours)
    entries = library.entries(ours)
    assert len({(entry.theirs, entry.part) for entry in entries}) == len(entries) == len(ours)
    theirs = exported(entries, ours)
    files.write(tmp_path / "x.safetensors", theirs)
    back = imported(entries, files.read(tmp_path / "x.safetensors"))
    assert back.keys() == ours.keys() and all((back[key] == ours[key]).all() for key in ours)


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


@pytest.mark.parametrize("address", ["hf://nobody", "hf://a/b/../../c d"])
def test_addresses(address):
    with pytest.raises(UserError, match="expected hf://owner/name"):
        hub.fetched(address)


def config(part, **changes):
    changes = dict(total="1st", test="no", eval_every="", devices=1, batch_size=4) | changes
    return tiny.config(model=part, **changes)


def pictures(side=32, classes=10):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (40, side, side, 3), np.uint8), np.arange(40) % classes


@pytest.fixture
def weights(tmp_path):
    """A ViT's weights as timm would name them, and what they are here."""
    _, ours = built("vit")
    ours = random_like(ours)
    theirs = exported(families.VIT_TIMM.entries(ours), ours)
    files.write(tmp_path / "vit.safetensors", theirs)
    return tmp_path / "vit.safetensors", ours, theirs


FROZEN = dict(optimizer=dict(name="sgd", learning_rate=1e-30), schedule=dict(name="constant"))


def test_a_run_begins_with_them(weights):
    path, ours, _ = weights
    result = train.run(config(SMALL["vit"], init_from=str(path), **FROZEN), data=pictures())
    assert all((leaf == ours[f"params/{name}"]).all() for name, leaf in named(result.params).items())


@pytest.mark.slow
def test_a_new_head_and_other_positions_are_asked_for(weights):
    path, ours, _ = weights
    given = dict(init_from=str(path), **FROZEN)
    with pytest.raises(UserError, match=r"head/.*config\.init_head='new'"):
        train.run(config(SMALL["vit"], **given), data=pictures(classes=4))
    with pytest.raises(UserError, match=r"positions.*config\.init_positions='resample'"):
        train.run(config(SMALL["vit"], **given), data=pictures(side=48))
    result = train.run(
        config(SMALL["vit"], **given, init_head="new", init_positions="resample"), data=pictures(48, classes=4)
    )
    params = named(result.params)
    assert params["head/kernel"].shape == (16, 4) and params["positions"].shape == (1, 37, 16)
    np.testing.assert_allclose(params["positions"][:, 0], ours["params/positions"][:, 0], rtol=1e-6)
    assert (params["embed/kernel"] == ours["params/embed/kernel"]).all()


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        (lambda found: found.pop("norm.bias"), "vit", ["params/norm/bias is missing"]),
        (lambda found: found.update(extra=found["norm.bias"]), "vit", ["extra is not in this model"]),
        (lambda found: found.update({"norm.bias": np.zeros(3, np.float32)}), "vit", ["norm/bias", "[3]", "[16]"]),
        (lambda found: found, "mlp", ["no map", "'mlp'", "vit"]),
    ],
    ids=["missing", "superfluous", "mismatched", "no family"],
)
def test_what_does_not_fit_is_named(change, part, words, weights):
    path, _, theirs = weights
    change(theirs)
    files.write(path, theirs)
    with pytest.raises(UserError) as error:
        train.run(config(SMALL.get(part, part), init_from=str(path)), data=pictures())
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


# Against PyTorch's own. None of these libraries is needed by jaxtrain, or installed with its tests.


def resnet(torch, name):
    torchvision = pytest.importorskip("torchvision", reason="parity with torchvision needs torchvision")
    kind = torchvision.models.resnet
    block, blocks = (kind.BasicBlock, [2, 2, 2, 2]) if name == "resnet" else (kind.Bottleneck, [3, 4, 6, 3])
    net = kind.ResNet(block, blocks, num_classes=10)
    return net, dict(SMALL[name], width=64)


def vit_timm(torch, name):
    timm = pytest.importorskip("timm", reason="parity with timm needs timm")
    options = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=10)
    return timm.models.vision_transformer.VisionTransformer(**options), SMALL[name]


def vit_hugging_face(torch, name):
    transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
    options = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    about = transformers.ViTConfig(**options, image_size=32, patch_size=8, num_labels=10)
    return transformers.ViTForImageClassification(about), SMALL[name]


def gpt2(torch, name):
    transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
    about = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=10, n_positions=32)
    return transformers.GPT2LMHeadModel(about), SMALL[name]


def llama(torch, name):
    transformers = pytest.importorskip("transformers", reason="parity with Hugging Face needs transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=10)
    about = transformers.LlamaConfig(**sizes, intermediate_size=40, rms_norm_eps=1e-5)
    return transformers.LlamaForCausalLM(about), SMALL[name]


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (resnet, "resnet"),
        (resnet, "bottleneck"),
        (vit_timm, "vit"),
        (vit_hugging_face, "vit"),
        (gpt2, "gpt"),
        (llama, "llama"),
    ],
    ids=["resnet18", "resnet50", "vit of timm", "vit of Hugging Face", "gpt2", "llama"],
)
def test_logits_are_those_of_pytorch(make, name, saved, tmp_path):
    torch = pytest.importorskip("torch", reason="parity with PyTorch needs torch, which jaxtrain does not")
    torch.manual_seed(0)
    net, part = make(torch, name)
    with torch.no_grad():
        for key, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand_like(tensor) if key.endswith("var") else torch.randn_like(tensor)
                tensor.add_(noise * (0.02 if tensor.ndim < 4 else 0.001))  # logits of a trained net's size
    net.eval()
    path = tmp_path / f"model.{saved}"
    if hasattr(net, "save_pretrained"):  # under the names that are published, which newer versions do not use inside
        net.save_pretrained(tmp_path)
        if saved == "pt":
            torch.save(
                {
                    key: torch.from_numpy(each.copy())
                    for key, each in files.read(tmp_path / "model.safetensors").items()
                },
                path,
            )
    elif saved == "pt":
        torch.save({"state_dict": net.state_dict(), "epoch": 3}, path)
    else:
        pytest.importorskip("safetensors.torch", reason="writes the file as others do").save_file(
            net.state_dict(), path
        )
    model = build_model(part, num_classes=10, input_shape=(32, 32, 3), dtype=jnp.float32)
    shapes = named(
        dict(zip(("params", "model_state"), jax.eval_shape(model.init, jax.random.key(0), None), strict=True))
    )
    tensors = files.read(path)
    library, entries = families.matching(part["name"], shapes, tensors)
    tree = nested(imported(entries, tensors))
    x = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype(np.float32)
    if name in ("gpt", "llama"):
        x = np.random.default_rng(0).integers(0, 10, (4, 12))
    with jax.default_matmul_precision("highest"):
        found, _ = model.apply(tree["params"], tree.get("model_state", {}), jnp.asarray(x), key=None, train=False)
    expected = net(torch.from_numpy(x) if x.ndim == 2 else torch.from_numpy(x).permute(0, 3, 1, 2))
    expected = getattr(expected, "logits", expected).detach().numpy()
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-4)
    again = exported(entries, named(tree))
    assert all((again[key] == tensors[key]).all() for key in again)
