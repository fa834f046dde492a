"""The same four networks in PyTorch, as plain modules. GPT's parameters have jaxtrain's names, to be copied by."""

import torch
from torch import nn
from torch.nn import functional as F


class ResNet18(nn.Module):
    """With the stem for CIFAR: uint8 [B, 3, H, W] -> [B, classes]."""

    def __init__(self, classes: int, width: int = 64):
        super().__init__()
        self.stem = _conv_norm(3, width, 3)
        self.stages = nn.ModuleList()
        channels = width
        for stage in range(4):
            features, stride = width * 2**stage, 2 if stage else 1
            first, second = _Residual(channels, features, stride), _Residual(features, features, 1)
            self.stages.append(nn.Sequential(first, second))
            channels = features
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x / 255).relu()
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    """With a CLS token: uint8 [B, 3, H, W] -> [B, classes]."""

    def __init__(self, classes: int, side: int, patch: int, width: int, depth: int, heads: int):
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(_Block(width, heads, epsilon=1e-6) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x / 255).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT(nn.Module):
    """GPT-2's decoder with tied embeddings: tokens [B, T] -> [B, T, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.stack = nn.ModuleDict({"blocks": nn.Sequential(*(_Block(width, heads, text=True) for _ in range(depth)))})
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.stack["blocks"](x)) @ self.embedding.weight.T


class LSTM(nn.Module):
    """PyTorch's own over embeddings, which has a second bias in each layer: tokens [B, T] -> [B, T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


class _Residual(nn.Module):
    def __init__(self, channels: int, features: int, stride: int):
        super().__init__()
        self.layers = nn.Sequential(
            _conv_norm(channels, features, 3, stride), nn.ReLU(), _conv_norm(features, features, 3)
        )
        self.shortcut = _conv_norm(channels, features, 1, stride) if channels != features else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) + self.shortcut(x)).relu()


def _conv_norm(channels: int, features: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, features, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(features))


class _Block(nn.Module):
    """Attention and a feed-forward part, each on the normalised stream: of a text causal, and with GPT-2's GELU."""

    def __init__(self, width: int, heads: int, *, text: bool = False, epsilon: float = 1e-5):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=epsilon)
        self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value", "out")})
        self.feed_norm = nn.LayerNorm(width, eps=epsilon)
        self.feed = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
        self.heads, self.text = heads, text

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            self.attention[name](y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.text)
        x = x + self.attention["out"](y.transpose(1, 2).flatten(2))
        y = F.gelu(self.feed["up"](self.feed_norm(x)), approximate="tanh" if self.text else "none")
        return x + self.feed["down"](y)
