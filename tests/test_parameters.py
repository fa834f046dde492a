"""The parameter table: few rows, whose counts add up, whatever the network."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.reporting.parameters import parameter_count, parameter_table


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(n: int, m: int) -> dict[str, object]:
    return {"bias": leaf(m), "kernel": leaf(n, m)}


def block(width: int) -> dict[str, object]:
    mlp = {"up": dense(width, 4 * width), "down": dense(4 * width, width)}
    return {"attention": {name: dense(width, width) for name in "qkvo"}, "mlp": mlp, "scale": leaf(width)}


EMPTY: dict[str, object] = {}
SMALL = {"conv_0": dense(9, 32), "norm": {"bias": leaf(32), "scale": leaf(32)}, "temperature": leaf()}
GPT = {"blocks": {i: block(64) for i in range(48)}, "embed": leaf(1000, 64), "head": dense(64, 1000)}
NAMED = {"embed": leaf(1000, 64), **{f"block_{i}": block(64) for i in range(12)}, "head": dense(64, 1000)}
STAGES = {f"stage_{i}": {f"block_{j}": dense(8 << i, 8 << i) for j in range(6)} for i in range(4)}
UNEVEN = {f"layer_{i}": dense(i + 1, i + 2) for i in range(40)}
LSTM = {"cell": {name: leaf(8, 8) for name in ("hf", "hg", "hi", "ho", "if", "ig", "ii", "io")}}


@pytest.mark.parametrize(
    "params",
    [EMPTY, SMALL, GPT, NAMED, STAGES, UNEVEN, LSTM],
    ids=["empty", "small", "gpt", "named", "stages", "uneven", "lstm"],
)
@pytest.mark.parametrize("limit", [2, 5, 15, 1000])
def test_rows_are_few_and_add_up(params, limit):
    rows = parameter_table(params, limit)
    sizes = [int(jnp.prod(jnp.array(one.shape, jnp.int32))) for one in jax.tree.leaves(params)]
    assert len(rows) <= limit
    assert sum(row.count for row in rows) == sum(sizes) == parameter_count(params)


@pytest.mark.parametrize(
    "params, expected",
    [
        (
            SMALL,
            [
                ("conv_0", "kernel 9×32, bias 32", 320),
                ("norm", "scale 32, bias 32", 64),
                ("temperature", "scalar", 1),
            ],
        ),
        (LSTM, [("cell", "8 tensors", 512)]),
        (
            NAMED,
            [
                ("block_0–11/attention/k", "12 × (kernel 64×64, bias 64)", 12 * 4160),
                ("block_0–11/attention/o", "12 × (kernel 64×64, bias 64)", 12 * 4160),
                ("block_0–11/attention/q", "12 × (kernel 64×64, bias 64)", 12 * 4160),
                ("block_0–11/attention/v", "12 × (kernel 64×64, bias 64)", 12 * 4160),
                ("block_0–11/mlp/down", "12 × (kernel 256×64, bias 64)", 12 * 16448),
                ("block_0–11/mlp/up", "12 × (kernel 64×256, bias 256)", 12 * 16640),
                ("block_0–11/scale", "12 × 64", 768),
                ("embed", "1000×64", 64000),
                ("head", "kernel 64×1000, bias 1000", 65000),
            ],
        ),
    ],
)
def test_rows_read_well(params, expected):
    assert [tuple(vars(row).values()) for row in parameter_table(params)] == expected


def test_equal_blocks_become_one_row():
    rows = {row.path: row for row in parameter_table(GPT)}
    assert rows["blocks/0–47/scale"].count == 48 * 64


def test_equal_shapes_in_another_order_are_not_equal_blocks():
    params = {"block_0": dense(4, 8), "block_1": dense(8, 4), "block_2": dense(4, 8)} | UNEVEN
    assert not any("block_0–" in row.path for row in parameter_table(params, 50))


def test_numbers_sort_as_numbers():
    assert [row.path for row in parameter_table({f"l{i}": leaf(i + 1) for i in (10, 9, 1)})] == [
        "l1",
        "l9",
        "l10",
    ]


def test_what_does_not_fit_is_summed_up():
    rows = parameter_table(UNEVEN, 4)
    assert [row.path for row in rows] == ["layer_37", "layer_38", "layer_39", "… 37 more"]
