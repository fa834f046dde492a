"""The parameter table: a network of any depth in a dozen rows, equal blocks in one."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.reporting.wording import Row


@dataclasses.dataclass(frozen=True)
class _Node:
    """A tensor (`shape`) or a module (`children`), standing `times` times in a row."""

    name: str
    shape: tuple[int, ...] | None
    children: tuple["_Node", ...] = ()
    times: int = 1

    @property
    def size(self) -> int:
        own = math.prod(self.shape) if self.shape is not None else sum(node.size for node in self.children)
        return own * self.times

    @property
    def tensors(self) -> int:
        return self.times * (1 if self.shape is not None else sum(node.tensors for node in self.children))

    @property
    def is_layer(self) -> bool:
        """A tensor, or a module of nothing but tensors: what no row goes below."""
        return self.shape is not None or all(child.shape is not None for child in self.children)


def parameter_table(params: Mapping[str, Any], limit: int = 15) -> tuple[Row, ...]:
    """At most `limit` rows for nested dicts of anything with a `shape` (arrays, ShapeDtypeStructs).

    A row for every layer where they fit; else equal blocks that follow each other become one, and modules are
    opened only as deep as fits. The counts of the rows add up to `parameter_count(params)`.
    """
    full = _node("", params)
    merged = _merged(full)
    views = itertools.chain([(full, None), (merged, None)], ((merged, depth) for depth in range(_depth(merged), 0, -1)))
    rows: list[Row] = []
    for root, depth in views:
        rows = list(_rows(root, "", 1, depth))
        if len(rows) <= limit:
            return tuple(rows)
    return _largest(rows, limit)


def parameter_count(params: Mapping[str, Any]) -> int:
    """The number of parameters in nested dicts of arrays."""
    return _node("", params).size


def _node(name: str, tree: Any) -> _Node:
    if isinstance(tree, Mapping):
        return _Node(name, None, tuple(_node(str(key), tree[key]) for key in sorted(tree, key=_natural)))
    return _Node(name, tuple(tree.shape))


def _natural(key: Any) -> list[tuple[int, int, str]]:
    """Sorts "block_10" behind "block_9"."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", str(key))]


def _merged(node: _Node) -> _Node:
    """The same tree, where numbered siblings that are equal are one node."""
    children = [_merged(child) for child in node.children]
    runs = itertools.groupby(children, lambda child: (_stem(child.name), dataclasses.replace(child, name="")))
    return dataclasses.replace(node, children=tuple(_one(list(run)) for _, run in runs))


def _one(run: list[_Node]) -> _Node:
    if len(run) == 1:
        return run[0]
    last = run[-1].name
    name = f"{run[0].name}–{last[len(_stem(last)) :]}"
    return dataclasses.replace(run[0], name=name, times=len(run))


def _stem(name: str) -> str:
    return re.sub(r"\d+$", "", name)


def _rows(node: _Node, above: str, times: int, depth: int | None) -> Iterator[Row]:
    """Rows of all below `node`, which stands `times` times; modules opened `depth` levels deep (or all)."""
    for child in node.children:
        path = f"{above}/{child.name}" if above else child.name
        if child.is_layer or depth == 1:
            yield Row(path, _content(child, times * child.times), child.size * times)
        else:
            yield from _rows(child, path, times * child.times, None if depth is None else depth - 1)


def _content(node: _Node, times: int) -> str:
    """ "kernel 3×3×16×32, bias 32", its large tensors first; only a number where it would be long."""
    repeats = f"{times} × " if times > 1 else ""
    if node.shape is not None:
        return repeats + _extent(node.shape)
    if node.is_layer and len(node.children) <= 2:
        named = sorted(node.children, key=lambda child: (-child.size, child.name == "bias"))
        text = ", ".join(f"{child.name} {_extent(child.shape or ())}" for child in named)
        return f"{repeats}({text})" if repeats else text
    return f"{node.tensors * times // node.times} tensors"


def _extent(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _depth(node: _Node) -> int:
    return 0 if node.is_layer else 1 + max(_depth(child) for child in node.children)


def _largest(rows: list[Row], limit: int) -> tuple[Row, ...]:
    """The largest rows in their order, and one row for all others."""
    chosen = sorted(range(len(rows)), key=lambda index: -rows[index].count)[: limit - 1]
    kept = [rows[index] for index in sorted(chosen)]
    rest = sum(row.count for row in rows) - sum(row.count for row in kept)
    return (*kept, Row(f"… {len(rows) - len(kept)} more", "", rest))
