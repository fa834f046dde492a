"""The names that torchvision, timm and Hugging Face gave the tensors of the families that are here too."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.weights.names import Entry, NameMap, Rule

RESNET = NameMap(
    "torchvision (and timm)",
    (
        Rule("stem/conv", "conv1", "conv"),
        Rule("stem/norm", "bn1", "norm"),
        Rule(r"stages/(\d+)/(\d+)/layers/(\d+)/conv", lambda s, b, k: f"layer{s + 1}.{b}.conv{k + 1}", "conv"),
        Rule(r"stages/(\d+)/(\d+)/layers/(\d+)/norm", lambda s, b, k: f"layer{s + 1}.{b}.bn{k + 1}", "norm"),
        Rule(r"stages/(\d+)/(\d+)/shortcut/conv", lambda s, b: f"layer{s + 1}.{b}.downsample.0", "conv"),
        Rule(r"stages/(\d+)/(\d+)/shortcut/norm", lambda s, b: f"layer{s + 1}.{b}.downsample.1", "norm"),
        Rule("head", "fc", "linear"),
    ),
    counted=r".*\.num_batches_tracked",
)

VIT_TIMM = NameMap(
    "timm",
    (
        Rule("embed", "patch_embed.proj", "conv"),
        Rule("cls", "cls_token", "array"),
        Rule("positions", "pos_embed", "array"),
        Rule(r"blocks/(\d+)/attention_norm", lambda b: f"blocks.{b}.norm1", "norm"),
        Rule(r"blocks/(\d+)/attention/query", lambda b: f"blocks.{b}.attn.qkv", "linear", (0, 3)),
        Rule(r"blocks/(\d+)/attention/key", lambda b: f"blocks.{b}.attn.qkv", "linear", (1, 3)),
        Rule(r"blocks/(\d+)/attention/value", lambda b: f"blocks.{b}.attn.qkv", "linear", (2, 3)),
        Rule(r"blocks/(\d+)/attention/out", lambda b: f"blocks.{b}.attn.proj", "linear"),
        Rule(r"blocks/(\d+)/mlp_norm", lambda b: f"blocks.{b}.norm2", "norm"),
        Rule(r"blocks/(\d+)/mlp/wide", lambda b: f"blocks.{b}.mlp.fc1", "linear"),
        Rule(r"blocks/(\d+)/mlp/narrow", lambda b: f"blocks.{b}.mlp.fc2", "linear"),
        Rule("norm", "norm", "norm"),
        Rule("head", "head", "linear"),
    ),
)

_LAYER = "vit.encoder.layer"
VIT_HUGGING_FACE = NameMap(
    "Hugging Face",
    (
        Rule("embed", "vit.embeddings.patch_embeddings.projection", "conv"),
        Rule("cls", "vit.embeddings.cls_token", "array"),
        Rule("positions", "vit.embeddings.position_embeddings", "array"),
        Rule(r"blocks/(\d+)/attention_norm", lambda b: f"{_LAYER}.{b}.layernorm_before", "norm"),
        Rule(r"blocks/(\d+)/attention/query", lambda b: f"{_LAYER}.{b}.attention.attention.query", "linear"),
        Rule(r"blocks/(\d+)/attention/key", lambda b: f"{_LAYER}.{b}.attention.attention.key", "linear"),
        Rule(r"blocks/(\d+)/attention/value", lambda b: f"{_LAYER}.{b}.attention.attention.value", "linear"),
        Rule(r"blocks/(\d+)/attention/out", lambda b: f"{_LAYER}.{b}.attention.output.dense", "linear"),
        Rule(r"blocks/(\d+)/mlp_norm", lambda b: f"{_LAYER}.{b}.layernorm_after", "norm"),
        Rule(r"blocks/(\d+)/mlp/wide", lambda b: f"{_LAYER}.{b}.intermediate.dense", "linear"),
        Rule(r"blocks/(\d+)/mlp/narrow", lambda b: f"{_LAYER}.{b}.output.dense", "linear"),
        Rule("norm", "vit.layernorm", "norm"),
        Rule("head", "classifier", "linear"),
    ),
)


def _gpt2(prefix: str) -> NameMap:
    return NameMap(
        "Hugging Face",
        (
            Rule("embedding", f"{prefix}wte", "embedding"),
            Rule("positions", f"{prefix}wpe", "embedding"),
            Rule(r"stack/blocks/(\d+)/attention_norm", lambda b: f"{prefix}h.{b}.ln_1", "norm"),
            Rule(r"stack/blocks/(\d+)/attention/query", lambda b: f"{prefix}h.{b}.attn.c_attn", "conv1d", (0, 3)),
            Rule(r"stack/blocks/(\d+)/attention/key", lambda b: f"{prefix}h.{b}.attn.c_attn", "conv1d", (1, 3)),
            Rule(r"stack/blocks/(\d+)/attention/value", lambda b: f"{prefix}h.{b}.attn.c_attn", "conv1d", (2, 3)),
            Rule(r"stack/blocks/(\d+)/attention/out", lambda b: f"{prefix}h.{b}.attn.c_proj", "conv1d"),
            Rule(r"stack/blocks/(\d+)/feed_norm", lambda b: f"{prefix}h.{b}.ln_2", "norm"),
            Rule(r"stack/blocks/(\d+)/feed/up", lambda b: f"{prefix}h.{b}.mlp.c_fc", "conv1d"),
            Rule(r"stack/blocks/(\d+)/feed/down", lambda b: f"{prefix}h.{b}.mlp.c_proj", "conv1d"),
            Rule("norm", f"{prefix}ln_f", "norm"),
            Rule("head", "lm_head", "linear"),
        ),
        counted=r".*\.attn\.(masked_)?bias",  # the causal mask, kept as a tensor
    )


GPT2 = _gpt2("transformer.")
GPT2_BARE = _gpt2("")  # as it was first published
_BLOCK = "model.layers"
LLAMA = NameMap(
    "Hugging Face",
    (
        Rule("embedding", "model.embed_tokens", "embedding"),
        Rule(r"stack/blocks/(\d+)/attention_norm", lambda b: f"{_BLOCK}.{b}.input_layernorm", "norm"),
        Rule(r"stack/blocks/(\d+)/attention/query", lambda b: f"{_BLOCK}.{b}.self_attn.q_proj", "linear"),
        Rule(r"stack/blocks/(\d+)/attention/key", lambda b: f"{_BLOCK}.{b}.self_attn.k_proj", "linear"),
        Rule(r"stack/blocks/(\d+)/attention/value", lambda b: f"{_BLOCK}.{b}.self_attn.v_proj", "linear"),
        Rule(r"stack/blocks/(\d+)/attention/out", lambda b: f"{_BLOCK}.{b}.self_attn.o_proj", "linear"),
        Rule(r"stack/blocks/(\d+)/feed_norm", lambda b: f"{_BLOCK}.{b}.post_attention_layernorm", "norm"),
        Rule(r"stack/blocks/(\d+)/feed/gate", lambda b: f"{_BLOCK}.{b}.mlp.gate_proj", "linear"),
        Rule(r"stack/blocks/(\d+)/feed/up", lambda b: f"{_BLOCK}.{b}.mlp.up_proj", "linear"),
        Rule(r"stack/blocks/(\d+)/feed/down", lambda b: f"{_BLOCK}.{b}.mlp.down_proj", "linear"),
        Rule("norm", "model.norm", "norm"),
        Rule("head", "lm_head", "linear"),
    ),
    counted=r".*\.rotary_emb\.inv_freq",
)

FAMILIES = {  # config.model.name -> the libraries that have published weights
    "resnet": (RESNET,),
    "vit": (VIT_TIMM, VIT_HUGGING_FACE),
    "gpt": (GPT2, GPT2_BARE),
    "llama": (LLAMA,),
}


def matching(model: str, ours: Mapping[str, Any], theirs: Collection[str]) -> tuple[NameMap, list[Entry]]:
    """The map, and its entries, that names most of the tensors in a file.

    Raises UserError for a model that no map is known of, and for one with an option that none of them has.
    """
    if model not in FAMILIES:
        raise UserError(
            f"there is no map from PyTorch's names to those of model {model!r}.{choices_hint(model, FAMILIES)}"
        )
    found = [(names, names.entries(ours)) for names in FAMILIES[model]]
    return max(found, key=lambda each: len({entry.theirs for entry in each[1]} & set(theirs)))
