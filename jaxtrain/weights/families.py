"""The names that torchvision, timm and Hugging Face gave the tensors of the families that are here too."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.weights.names import Entry, NameMap, Rule


def _layers(ours: str, theirs: str, names: Mapping[str, str], linear: str = "linear") -> tuple[Rule, ...]:
    """Norms and linear layers below `ours`, and what each is called below `theirs`.

    "attention/key+value" are two of ours that theirs has in one.
    """
    found = []
    for layer, name in names.items():
        folder, slash, last = layer.rpartition("/")
        parts = last.split("+")
        for place, part in enumerate(parts):
            kind = "norm" if part.endswith("norm") else linear
            found.append(Rule(ours + folder + slash + part, theirs + name, kind, (place, len(parts))))
    return tuple(found)


RESNET = NameMap(
    "torchvision (and timm)",
    (
        Rule("stem/conv", "conv1", "conv"),
        Rule("stem/norm", "bn1", "norm"),
        Rule("stages/{}/{}/layers/{}/conv", lambda s, b, k: f"layer{s + 1}.{b}.conv{k + 1}", "conv"),
        Rule("stages/{}/{}/layers/{}/norm", lambda s, b, k: f"layer{s + 1}.{b}.bn{k + 1}", "norm"),
        Rule("stages/{}/{}/shortcut/conv", lambda s, b: f"layer{s + 1}.{b}.downsample.0", "conv"),
        Rule("stages/{}/{}/shortcut/norm", lambda s, b: f"layer{s + 1}.{b}.downsample.1", "norm"),
        Rule("head", "fc", "linear"),
    ),
    counted=r".*\.num_batches_tracked",
)

CONVNEXT_TORCHVISION = NameMap(
    "torchvision",
    (
        Rule("shrinks/0/conv", "features.0.0", "conv"),
        Rule("shrinks/0/norm", "features.0.1", "norm"),
        Rule("shrinks/{}/norm", lambda s: f"features.{2 * s}.0", "norm"),
        Rule("shrinks/{}/conv", lambda s: f"features.{2 * s}.1", "conv"),
        Rule("stages/{}/{}/scale", lambda s, b: f"features.{2 * s + 1}.{b}.layer_scale", "channels"),
        Rule("stages/{}/{}/spatial", lambda s, b: f"features.{2 * s + 1}.{b}.block.0", "conv"),
        Rule("stages/{}/{}/norm", lambda s, b: f"features.{2 * s + 1}.{b}.block.2", "norm"),
        Rule("stages/{}/{}/wide", lambda s, b: f"features.{2 * s + 1}.{b}.block.3", "linear"),
        Rule("stages/{}/{}/narrow", lambda s, b: f"features.{2 * s + 1}.{b}.block.5", "linear"),
        Rule("norm", "classifier.0", "norm"),
        Rule("head", "classifier.2", "linear"),
    ),
)
CONVNEXT_TIMM = NameMap(
    "timm",
    (
        Rule("shrinks/0/conv", "stem.0", "conv"),
        Rule("shrinks/0/norm", "stem.1", "norm"),
        Rule("shrinks/{}/norm", "stages.{}.downsample.0", "norm"),
        Rule("shrinks/{}/conv", "stages.{}.downsample.1", "conv"),
        Rule("stages/{}/{}/scale", "stages.{}.blocks.{}.gamma", "array"),
        Rule("stages/{}/{}/spatial", "stages.{}.blocks.{}.conv_dw", "conv"),
        *_layers("stages/{}/{}/", "stages.{}.blocks.{}.", {"norm": "norm", "wide": "mlp.fc1", "narrow": "mlp.fc2"}),
        *_layers("", "head.", {"norm": "norm", "head": "fc"}),
    ),
)
CONVNEXT_HUGGING_FACE = NameMap(
    "Hugging Face",
    (
        Rule("shrinks/0/conv", "convnext.embeddings.patch_embeddings", "conv"),
        Rule("shrinks/0/norm", "convnext.embeddings.layernorm", "norm"),
        Rule("shrinks/{}/norm", "convnext.encoder.stages.{}.downsampling_layer.0", "norm"),
        Rule("shrinks/{}/conv", "convnext.encoder.stages.{}.downsampling_layer.1", "conv"),
        Rule("stages/{}/{}/scale", "convnext.encoder.stages.{}.layers.{}.layer_scale_parameter", "array"),
        Rule("stages/{}/{}/spatial", "convnext.encoder.stages.{}.layers.{}.dwconv", "conv"),
        *_layers(
            "stages/{}/{}/",
            "convnext.encoder.stages.{}.layers.{}.",
            {"norm": "layernorm", "wide": "pwconv1", "narrow": "pwconv2"},
        ),
        *_layers("", "", {"norm": "convnext.layernorm", "head": "classifier"}),
    ),
)

VIT_TIMM = NameMap(
    "timm",
    (
        Rule("embed", "patch_embed.proj", "conv"),
        Rule("cls", "cls_token", "array"),
        Rule("positions", "pos_embed", "array"),
        *_layers(
            "blocks/{}/",
            "blocks.{}.",
            {
                "attention_norm": "norm1",
                "attention/query+key+value": "attn.qkv",
                "attention/out": "attn.proj",
                "mlp_norm": "norm2",
                "mlp/wide": "mlp.fc1",
                "mlp/narrow": "mlp.fc2",
            },
        ),
        Rule("pool/query", "attn_pool.latent", "array"),
        *_layers(
            "pool/",
            "attn_pool.",
            {
                "attention/query": "q",
                "attention/key+value": "kv",
                "attention/out": "proj",
                "norm": "norm",
                "mlp/wide": "mlp.fc1",
                "mlp/narrow": "mlp.fc2",
            },
        ),
        *_layers("", "", {"norm": "norm", "head": "head"}),
    ),
)
VIT_TORCHVISION = NameMap(
    "torchvision",
    (
        Rule("embed", "conv_proj", "conv"),
        Rule("cls", "class_token", "array"),
        Rule("positions", "encoder.pos_embedding", "array"),
        *_layers(
            "blocks/{}/",
            "encoder.layers.encoder_layer_{}.self_attention.",
            {"attention/query+key+value": "in_proj"},
            linear="packed",
        ),
        *_layers(
            "blocks/{}/",
            "encoder.layers.encoder_layer_{}.",
            {
                "attention_norm": "ln_1",
                "attention/out": "self_attention.out_proj",
                "mlp_norm": "ln_2",
                "mlp/wide": "mlp.0",
                "mlp/narrow": "mlp.3",
            },
        ),
        *_layers("", "", {"norm": "encoder.ln", "head": "heads.head"}),
    ),
    needs=("cls",),
)
VIT_HUGGING_FACE = NameMap(
    "Hugging Face",
    (
        Rule("embed", "vit.embeddings.patch_embeddings.projection", "conv"),
        Rule("cls", "vit.embeddings.cls_token", "array"),
        Rule("positions", "vit.embeddings.position_embeddings", "array"),
        *_layers(
            "blocks/{}/",
            "vit.encoder.layer.{}.",
            {
                "attention_norm": "layernorm_before",
                "attention/query": "attention.attention.query",
                "attention/key": "attention.attention.key",
                "attention/value": "attention.attention.value",
                "attention/out": "attention.output.dense",
                "mlp_norm": "layernorm_after",
                "mlp/wide": "intermediate.dense",
                "mlp/narrow": "output.dense",
            },
        ),
        *_layers("", "", {"norm": "vit.layernorm", "head": "classifier"}),
    ),
    needs=("cls",),
)


def _gpt2(prefix: str) -> NameMap:
    return NameMap(
        "Hugging Face",
        (
            Rule("embedding", f"{prefix}wte", "embedding"),
            Rule("positions", f"{prefix}wpe", "embedding"),
            *_layers(
                "stack/blocks/{}/",
                prefix + "h.{}.",
                {
                    "attention_norm": "ln_1",
                    "attention/query+key+value": "attn.c_attn",
                    "attention/out": "attn.c_proj",
                    "feed_norm": "ln_2",
                    "feed/up": "mlp.c_fc",
                    "feed/down": "mlp.c_proj",
                },
                linear="conv1d",
            ),
            *_layers("", "", {"norm": f"{prefix}ln_f", "head": "lm_head"}),
        ),
        needs=("positions/embedding", "norm/bias", ".*/attention/query/bias"),
        counted=r".*\.attn\.(masked_)?bias",  # the causal mask, kept as a tensor
        tied={"lm_head.weight": f"{prefix}wte.weight"},
    )


GPT2 = _gpt2("transformer.")
GPT2_BARE = _gpt2("")  # as it was first published
LLAMA = NameMap(
    "Hugging Face",
    (
        Rule("embedding", "model.embed_tokens", "embedding"),
        *_layers(
            "stack/blocks/{}/",
            "model.layers.{}.",
            {
                "attention_norm": "input_layernorm",
                "attention/query": "self_attn.q_proj",
                "attention/key": "self_attn.k_proj",
                "attention/value": "self_attn.v_proj",
                "attention/out": "self_attn.o_proj",
                "attention/query_norm": "self_attn.q_norm",  # Qwen3's
                "attention/key_norm": "self_attn.k_norm",
                "feed_norm": "post_attention_layernorm",
                "feed/gate": "mlp.gate_proj",
                "feed/up": "mlp.up_proj",
                "feed/down": "mlp.down_proj",
            },
        ),
        *_layers("", "", {"norm": "model.norm", "head": "lm_head"}),
    ),
    counted=r".*\.rotary_emb\.inv_freq",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)

FAMILIES = {  # config.model.name -> the formats that weights of it are published in; the first is exported by default
    "resnet": {"torchvision": RESNET, "timm": RESNET},
    "convnext": {"torchvision": CONVNEXT_TORCHVISION, "timm": CONVNEXT_TIMM, "hf": CONVNEXT_HUGGING_FACE},
    "vit": {"timm": VIT_TIMM, "torchvision": VIT_TORCHVISION, "hf": VIT_HUGGING_FACE},
    "gpt": {"hf": GPT2, "hf-bare": GPT2_BARE},
    "llama": {"hf": LLAMA},
}


def formats(model: str) -> Mapping[str, NameMap]:
    """The maps of a model's names, by format. Raises UserError for a model that no map is known of."""
    if model not in FAMILIES:
        raise UserError(
            f"there is no map between PyTorch's names and those of model {model!r}.{choices_hint(model, FAMILIES)}"
        )
    return FAMILIES[model]


def matching(model: str, ours: Mapping[str, Any], theirs: Collection[str]) -> tuple[NameMap, list[Entry]]:
    """The map, and its entries, that names most of the tensors in a file.

    Raises UserError for a model that no map is known of, and for one with an option that none of them has.
    """
    found, refused = [], []
    for names in formats(model).values():
        try:
            found.append((names, names.entries(ours)))
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return max(found, key=lambda each: len({entry.theirs for entry in each[1]} & set(theirs)))
