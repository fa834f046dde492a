"""How numbers read."""

import math

import pytest
from ml_collections import ConfigDict

from jaxtrain.reporting import wording


@pytest.mark.parametrize(
    "metric, number, text",
    [
        ("accuracy", 0.9722, "97.22%"),
        ("top5_accuracy", 1.0, "100.00%"),
        ("loss", 0.09120, "0.09120"),
        ("loss", 2.0, "2.000"),
        ("loss", 1e-7, "1.000e-07"),
        ("learning_rate", 0.001, "1.00e-03"),
        ("skipped", 3.0, "3"),
        ("loss", math.nan, "nan"),
        ("accuracy", math.inf, "inf"),
        ("loss", -math.inf, "-inf"),
    ],
)
def test_values(metric, number, text):
    assert wording.value(metric, number) == text


@pytest.mark.parametrize(
    "number, text",
    [(0.5, "0.5"), (87.31, "87.3"), (9412, "9,412"), (12_400, "12.4k"), (999_400, "999k"), (1.35e6, "1.35M")]
    + [(2e10, "20.0G"), (math.inf, "–"), (math.nan, "–")],
)
def test_rates(number, text):
    assert wording.quantity(number) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (83, "1:23"),
        (5025, "1:23:45"),
        (184_210, "2d 03:10"),
        (-1, "0:00"),
    ],
)
def test_times(seconds, text):
    assert wording.countdown(seconds) == text


def test_short_times_have_a_fraction():
    assert wording.clock(3.21) == "3.2 s" and wording.clock(83) == "1:23"


@pytest.mark.parametrize("size, text", [(512 * 2**20, "512 MiB"), (3.2 * 2**30, "3.2 GiB")])
def test_sizes(size, text):
    assert wording.memory(size) == text


@pytest.mark.parametrize(
    "numbers, width, text",
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 8, "▁▂▃▄▅▆▇█"),
        ([2, 2, 1, 1], 2, "█▁"),
        ([1, 1], 9, "▁▁"),
        ([1], 9, ""),
        ([], 9, ""),
    ]
    + [([2, math.nan, 1, math.inf], 9, "█▁"), ([1, 2], 1, "")],
)
def test_sparklines(numbers, width, text):
    assert wording.sparkline(numbers, width) == text


def test_a_training_line_shows_any_metric_the_usual_first():
    scalars = {"train/learning_rate": 0.1, "train/kl": 0.5, "train/accuracy": 0.5, "train/loss": 1.5}
    line = wording.Line(5, scalars, total=10, steps_per_epoch=math.inf)
    text = "step 5/10  loss 1.500  accuracy 50.00%  kl 0.5000  lr 1.00e-01"
    assert wording.training_line(line) == text


def test_a_config_reads_as_it_is_typed():
    config = ConfigDict({"seed": 0, "model": {"name": "cnn", "width": 32}, "augment": (), "evals": {}, "threads": 2})
    assert wording.render_config(config) == "\n".join(
        ["augment     = ()", "evals       = {}", "model.name  = 'cnn'", "model.width = 32", "seed        = 0"]
        + ["threads     = 2"]
    )
    kinds = {"seed": "run", "model": "run", "augment": "run", "evals": "view", "threads": "place"}
    assert "# place\nthreads = 2" in wording.render_config(config, kinds)
