"""Language: losses a token by the book, texts as windows, what is drawn from a model, and a run of it all."""

import dataclasses
import functools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain import config as configs
from jaxtrain import metrics, sample, train
from jaxtrain.config import lookup
from jaxtrain.data import csv, sources, text, tokens
from jaxtrain.data.vocabulary import Bytes, vocabulary
from jaxtrain.errors import UserError
from jaxtrain.sample import Sampler, Sampling
from jaxtrain.tasks.language_modelling import LanguageModelling
from jaxtrain.tasks.sequence_classification import MacroF1, SequenceClassification

V, T = 7, 6
TOKENS = np.random.default_rng(0).integers(0, V, (8, T + 1)).astype(np.int32)
# Texts and padding, unevenly: from no token to be predicted to all of them.
SEGMENTS = np.array(
    [[1] * 7, [1, 1, 1, 2, 2, 2, 0], [0] * 7, [1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
    + [[1, 1, 2, 2, 3, 3, 4], [1, 2, 2, 2, 2, 2, 2]],
    np.int32,
)
ASKED = (SEGMENTS[:, 1:] == SEGMENTS[:, :-1]) & (SEGMENTS[:, 1:] > 0)
LOGITS = np.random.default_rng(1).normal(size=(8, T, V)).astype(np.float32)


def log_p(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


NATS = -np.take_along_axis(log_p(LOGITS), TOKENS[:, 1:, None], axis=-1)[:, :, 0]  # [B, T]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("packed", [False, True])
def test_losses_are_sums_over_tokens_and_counts_how_many(packed, z_loss):
    task = LanguageModelling(num_classes=V, z_loss=z_loss)
    batch = {"tokens": TOKENS, "segments": SEGMENTS} if packed else {"tokens": TOKENS}
    asked = ASKED if packed else np.ones_like(ASKED)
    drift = np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=-1)) ** 2
    with jax.numpy_dtype_promotion("strict"):
        losses, counts = task.losses(jnp.asarray(LOGITS), jax.tree.map(jnp.asarray, batch)), task.counts(batch)
    np.testing.assert_allclose(losses, ((NATS + z_loss * drift) * asked).sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(counts, asked.sum(axis=1))
    assert losses.dtype == jnp.float32 and counts.dtype == jnp.int32


@pytest.mark.parametrize("packed", [False, True])
def test_metrics_are_means_over_the_tokens_of_valid_rows(packed):
    task = LanguageModelling(num_classes=V, z_loss=0.1)
    mask = np.array([True] * 5 + [False] * 3)
    asked = (ASKED if packed else np.ones_like(ASKED)) & mask[:, None]
    batch = {"tokens": TOKENS, "bytes": np.arange(8, dtype=np.int32)} | ({"segments": SEGMENTS} if packed else {})
    logits = np.where(mask[:, None, None], LOGITS, np.nan)  # whatever stands in a masked row
    found = metrics.compute(jax.jit(task.metrics)(logits, batch, mask))
    loss = NATS[asked].mean()
    hits = LOGITS.argmax(axis=-1) == TOKENS[:, 1:]
    expected = {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": hits[asked].mean(),
        "bits_per_byte": NATS[asked].sum() / math.log(2) / (0 + 1 + 2 + 3 + 4),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_of_equal_logits_the_first_is_the_guess_and_no_numbers_guess_nothing():
    tokens = np.array([[0, 0, 1, 2]], np.int32)
    for logits, accuracy in ((0.0, 1 / 3), (-np.inf, 1 / 3), (np.nan, 0.0)):
        outputs = jnp.full((1, 3, V), logits, jnp.float32)
        found = LanguageModelling(num_classes=V).metrics(outputs, {"tokens": tokens}, np.array([True]))
        assert metrics.compute(found)["accuracy"] == pytest.approx(accuracy), logits


def test_the_model_is_given_what_it_may_see():
    task = LanguageModelling(num_classes=V)
    np.testing.assert_array_equal(task.inputs({"tokens": TOKENS}), TOKENS[:, :-1])
    packed = task.inputs({"tokens": TOKENS, "segments": SEGMENTS})
    assert set(packed) == {"tokens", "segments"}
    np.testing.assert_array_equal(packed["segments"], SEGMENTS[:, :-1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LanguageModelling(num_classes=None), ["vocabulary of None"]),
        (lambda: LanguageModelling(num_classes=V, z_loss=-1.0), ["z_loss=-1.0"]),
        (lambda: LanguageModelling(num_classes=V).inputs({"image": TOKENS}), ["tokens", "image"]),
        (lambda: LanguageModelling(num_classes=V).check({"tokens": TOKENS, "id": np.arange(8) + 70}), None),
        (lambda: LanguageModelling(num_classes=3).check({"tokens": TOKENS, "id": np.arange(8) + 70}), ["0 to 2", "70"]),
        (lambda: LanguageModelling(num_classes=V).check({"tokens": TOKENS * 1.0}), ["float64"]),
        (lambda: LanguageModelling(num_classes=V).losses(LOGITS[:, 0], {"tokens": TOKENS}), ["[8, 7]", "gpt"]),
        (lambda: LanguageModelling(num_classes=V).losses(LOGITS[:, 1:], {"tokens": TOKENS}), ["[8, 5, 7]", "[8, 6"]),
        (lambda: SequenceClassification(num_classes=2).inputs({"tokens": TOKENS}), ["length"]),
        (
            lambda: SequenceClassification(num_classes=2).check(
                {"tokens": TOKENS, "length": np.full(8, 9), "label": np.zeros(8, np.int32)}
            ),
            ["example 0", "length 9"],
        ),
        (lambda: Sampling(temperature=-1.0), ["temperature is -1.0"]),
        (lambda: Sampling(top_k=-1), ["top_k is -1"]),
        (lambda: Sampling(top_p=0.0), ["top_p is 0.0"]),
        (lambda: text.text(), ["dataset=''", "files=''"]),
        (lambda: text.text(files="*.txt", separator="x"), ["pack=True"]),
        (lambda: text.text(files="*.txt", tokenizer="nowhere.json"), ["nowhere.json"]),
        (lambda: text.text(files="*.txt", tokenizer="words:9"), ["words:9", "no way back"]),
        (lambda: vocabulary("words:1"), ["words:1", "from 2 on"]),
        (lambda: vocabulary("words:many"), ["words:many"]),
        (lambda: vocabulary("words:9").decode([1]), ["words:9", "hashes"]),
        (lambda: text.text(files="nothing-*.txt").open(), ["nothing-*.txt"]),
        (lambda: text.speakers(speakers=1), ["speakers=1"]),
        (lambda: csv.csv(file="nothing.csv"), ["nothing.csv"]),
        (lambda: tokens.Windows(np.zeros(5, np.uint8), 5), ["5 tokens", "5 + 1"]),
        (lambda: tokens.tokens(dir="nowhere", vocabulary=9).open(), ["nowhere/train.bin"]),
    ],
)
def test_mistakes_are_one_line(call, words):
    if words is None:
        call()
        return
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_macro_f1_is_the_mean_over_the_classes_met():
    predicted, label = np.array([0, 0, 1, 1, 3, 0]), np.array([0, 1, 1, 1, 0, 2])
    mask = np.array([True] * 5 + [False])
    halves = [MacroF1.of(label[part], predicted[part], mask[part], 5) for part in (slice(0, 3), slice(3, 6))]
    found = metrics.compute({"f1": metrics.merge(*halves)})["f1"]
    # Class 0: 1 hit of 2 guesses and 2 examples; 1: 2 of 2 and 3; 3: 0 of 1 and 0. Nobody met 2 and 4.
    assert found == pytest.approx((2 * 1 / 4 + 2 * 2 / 5 + 0) / 3)
    assert math.isnan(metrics.compute({"f1": MacroF1.of(label, predicted, mask & False, 5)})["f1"])


def packed_data(rows=32):
    """Texts of very uneven length, so that a mean of means would show."""
    rng = np.random.default_rng(0)
    found = {
        "tokens": rng.integers(0, V, (rows, T + 1)).astype(np.int32),
        "segments": np.tile(SEGMENTS, (rows // 8, 1)),
    }
    source = sources.ArraySource(found)
    return sources.Dataset("packed", source.spec, V, (), lambda: {"train": source})


SMALL_GPT = dict(name="gpt", width=8, depth=1, heads=2, context=T)


def advanced(batches, **changes):
    sgd = dict(name="sgd", learning_rate=0.5)
    config = tiny.config(
        task=dict(name="language_modelling"), model=dict(name="nets:Bigrams"), optimizer=sgd, **changes
    )
    job = train.build(config, data=packed_data())
    state = job.initial()
    with job.batches(0, 2) as feed:
        for batch in feed:
            state, found = job.step(state, batches(batch))
    return jax.device_get(state.params), metrics.compute(found)


def masked(batch):
    """All rows of the first quarter are padding, and single ones elsewhere."""
    mask = np.arange(16) >= 4
    mask[[7, 11, 12]] = False
    return dict(batch, mask=jax.device_put(mask, batch["id"].sharding))


def only_valid(batch):
    keep = np.flatnonzero(np.asarray(masked(batch)["mask"]))
    return {name: np.asarray(value)[keep] for name, value in batch.items()}


@pytest.mark.parametrize(
    ("devices", "accumulate"), [(8, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (8, 1)))]
)
def test_the_mean_is_over_the_tokens_of_the_global_batch(devices, accumulate):
    """Report 10, for tokens: rows with no, some and all tokens valid, wherever they lie and however they are cut."""
    expected, one = advanced(only_valid, devices=1)
    found, many = advanced(masked, devices=devices, accumulate=accumulate)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), expected, found)
    for name in ("loss", "perplexity", "accuracy", "grad_norm"):
        assert many[name] == pytest.approx(one[name], rel=1e-4), name


def test_windows_are_found_by_number_and_every_token_is_asked_for_once():
    stream = np.arange(100, dtype=np.uint8)
    source = tokens.Windows(stream, 9)
    assert len(source) == 11 and source.spec["tokens"].shape == (10,) and source.spec["tokens"].dtype == np.uint8
    found = source.get(np.array([3, 0, 10]))
    np.testing.assert_array_equal(found["tokens"][0], np.arange(27, 37))
    np.testing.assert_array_equal(found["bytes"], [9, 9, 9])
    asked = source.get(np.arange(11))["tokens"][:, 1:].ravel()
    np.testing.assert_array_equal(asked, np.arange(1, 100))
    dense = tokens.Windows(stream, 9, stride=1)
    assert len(dense) == 91
    np.testing.assert_array_equal(dense.get(np.array([90]))["tokens"][0], np.arange(90, 100))


def test_texts_are_packed_with_numbers_and_positions_of_their_own():
    stream = np.array([5, 6, 0, 7, 0, 8, 9, 9, 0, 4, 4], np.uint8)
    found = tokens.Windows(stream, 10, end=0).get(np.array([0]))
    np.testing.assert_array_equal(found["segments"][0], [1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4])
    assert found["bytes"][0] == 1 + 0 + 2 + 1  # 6; of "7 0" the end alone; 9 9; 4


@pytest.mark.parametrize("shares", [dict(validation=0.1, test=0.2), dict(validation=0.5, test=0.0)])
def test_roles_are_pieces_that_do_not_overlap(shares):
    parts = tokens.cut(1000, **shares)
    found = [number for role in ("train", "validation", "test") if role in parts for number in range(1000)[parts[role]]]
    assert found == list(range(1000))
    for role, share in shares.items():
        assert (role in parts) == bool(share) and (not share or len(range(1000)[parts[role]]) == 1000 * share)


def test_files_are_read_in_order_cut_and_packed(tmp_path):
    for name, content in (("b.txt", "fox and grapes. "), ("a.txt", "héllo wörld. "), ("c.md", "no")):
        (tmp_path / name).write_text(content * 10, encoding="utf-8")
    dataset = text.text(files="*.txt", dir=str(tmp_path), window=8, validation=0.2, test=0.1)
    opened = dataset.open()
    whole = ("héllo wörld. " * 10 + "fox and grapes. " * 10).encode()
    assert dataset.num_classes == 256 and dataset.present()
    assert opened["train"].spec == dataset.spec
    joined = b"".join(opened[role].stream.tobytes() for role in ("train", "validation", "test"))
    assert joined == whole
    packed = text.text(files="*.txt", dir=str(tmp_path), window=8, pack=True, separator=". ", validation=0, test=0)
    assert packed.open()["train"].stream.tobytes() == ("héllo wörld\0" * 10 + "fox and grapes\0" * 10).encode()
    assert set(packed.spec) == {"tokens", "segments", "bytes"}
    (tmp_path / "d.txt").write_bytes(b"a\0b")
    with pytest.raises(UserError, match="byte 0"):
        packed.open()


@pytest.mark.parametrize(("dtype", "vocabulary"), [("<u2", 1300), ("<u2", 65536), ("<u4", 65537), ("<u4", 128256)])
def test_tokens_are_mapped_from_files(dtype, vocabulary, tmp_path):
    first = vocabulary - 1000
    numbers = np.arange(first, vocabulary).astype(dtype)
    numbers.tofile(tmp_path / "train.bin")
    numbers[:100].tofile(tmp_path / "val.bin")
    dataset = tokens.tokens(dir=str(tmp_path), vocabulary=vocabulary, window=10, test=0.1)
    opened = dataset.open()
    assert {role: len(source) for role, source in opened.items()} == {"train": 89, "validation": 9, "test": 9}
    batch = opened["test"].get(np.array([0]))
    np.testing.assert_array_equal(batch["tokens"][0], np.arange(first + 900, first + 911))
    assert batch["tokens"].dtype == np.int32 and isinstance(opened["train"].stream, np.memmap)
    (tmp_path / "test.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="3 bytes"):
        dataset.open()


def test_tiny_shakespeare_keeps_its_splits(shared_tfds):
    dataset = text.text(dataset="tiny_shakespeare", dir=str(shared_tfds), window=100, stride=1)
    opened = dataset.open()
    sizes = {role: len(source.stream) for role, source in opened.items()}
    assert sizes == {"train": 1003854, "validation": 55770, "test": 55770}
    assert len(opened["train"]) == 1003854 - 100 and len(opened["validation"]) == 557
    first = opened["train"].get(np.array([0]))["tokens"][0]
    assert Bytes().decode(first.tolist()).startswith("First Citizen:\nBefore we proceed")


def test_who_speaks(shared_tfds):
    dataset = text.speakers(dir=str(shared_tfds), speakers=3, length=64)
    opened = dataset.open()
    assert dataset.num_classes == 3 and "GLOUCESTER" in dataset.class_names
    batch = opened["train"].get(np.arange(len(opened["train"])))
    assert batch["tokens"].dtype == np.uint8 and batch["tokens"].shape[1] == 64
    assert set(batch["label"].tolist()) == {0, 1, 2} and batch["length"].min() > 0 and batch["length"].max() == 64
    behind = np.arange(64)[None] >= batch["length"][:, None]
    assert not batch["tokens"][behind].any() and (batch["tokens"][~behind] > 0).all()
    assert {role: len(source) for role, source in opened.items()} == dict(dataset.sizes)


def test_words_are_hashed_the_same_wherever_they_stand():
    words = vocabulary("words:50")
    (first, sizes), (second, _), (third, _) = words.encode(["Der Bär brummt.".encode(), b"brummt der", b"\xff!"])
    assert first.dtype == np.int32 and sizes.tolist() == [3, 4, 6, 1] and len(third) == 2
    assert second.tolist() == [first[2], first[0]]  # whatever their case
    many, _ = words.encode([" ".join(map(str, range(999))).encode()])[0]
    assert set(many.tolist()) == set(range(1, 50))


def test_a_csv_file_of_hashed_words(tmp_path):
    (tmp_path / "reviews.csv").write_text("text,label\n" + "a good one,yes\na bad one,no\n" * 20)
    dataset = csv.csv(file="reviews.csv", dir=str(tmp_path), tokenizer="words:4096", length=5)
    batch = dataset.open()["train"].get(np.arange(2))
    assert batch["tokens"].dtype == dataset.spec["tokens"].dtype == np.int32 and batch["length"].tolist() == [3, 3]
    assert dataset.spec["tokens"].shape == (5,) and batch["tokens"].max() < 4096


def test_a_csv_file_is_texts_and_labels(tmp_path):
    rows = ["review,stars", *(f'"good, {i}",five' for i in range(20)), *(f"bad {i},one" for i in range(20))]
    (tmp_path / "reviews.csv").write_text("\n".join(rows))
    dataset = csv.csv(file="reviews.csv", dir=str(tmp_path), text="review", label="stars", length=12)
    assert dataset.class_names == ("five", "one") and dataset.num_classes == 2
    batch = dataset.open()["train"].get(np.array([0]))
    assert bytes(batch["tokens"][0][: batch["length"][0]]).startswith(b"good, ") and batch["label"][0] == 0
    for change, words in (("review,star", "'stars'"), ("review,stars\na,\n", "line 2")):
        (tmp_path / "reviews.csv").write_text(change)
        with pytest.raises(UserError, match=words):
            csv.csv(file="reviews.csv", dir=str(tmp_path), text="review", label="stars")


class Letters:
    """What the package `tokenizers` gives, as far as it is asked: each word is a token."""

    words = ("<|endoftext|>", "der", "Bär", "brummt")

    @classmethod
    def from_file(cls, path):
        return cls()

    def get_vocab_size(self, with_added_tokens):
        return len(self.words)

    def token_to_id(self, name):
        return self.words.index(name) if name in self.words else None

    def encode_batch(self, texts, add_special_tokens):
        return [self.encode(each) for each in texts]

    def encode(self, text):
        ends = [place for place in range(1, len(text) + 1) if text[place : place + 1] in (" ", "")]
        starts = [0, *(end + 1 for end in ends[:-1])]
        ids = [self.words.index(text[start:end]) for start, end in zip(starts, ends, strict=True)]
        return types.SimpleNamespace(ids=ids, offsets=list(zip(starts, ends, strict=True)))

    def decode(self, ids, skip_special_tokens):
        return " ".join(self.words[each] for each in ids)


@pytest.fixture
def letters(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", types.SimpleNamespace(Tokenizer=Letters))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path / "tokenizer.json")


def test_a_tokenizer_counts_the_bytes_of_its_tokens(letters, tmp_path):
    (tmp_path / "a.txt").write_text("der Bär brummt der Bär", encoding="utf-8")
    dataset = text.text(files="*.txt", dir=str(tmp_path), tokenizer=letters, window=4, validation=0, test=0)
    for source in (dataset.open()["train"], dataset.open()["train"]):  # made, then from the cache
        batch = source.get(np.array([0]))
        np.testing.assert_array_equal(batch["tokens"][0], [1, 2, 3, 1, 2])
        assert batch["bytes"][0] == len(" Bär brummt der Bär".encode())
    assert dataset.num_classes == 4 and vocabulary(letters).decode([1, 2]) == "der Bär"
    packed = text.text(files="*.txt", dir=str(tmp_path), tokenizer=letters, pack=True, window=5, validation=0, test=0)
    np.testing.assert_array_equal(packed.open()["train"].get(np.array([0]))["tokens"][0], [1, 2, 3, 1, 2, 0])


def test_the_package_itself_is_read_and_goes_back_and_forth(tmp_path, monkeypatch):
    """A byte-level BPE like GPT-2's, made here: every byte of any text is counted once, and the text comes back."""
    made = pytest.importorskip("tokenizers", reason="needs the extra text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = made.Tokenizer(made.models.BPE())
    tokenizer.pre_tokenizer = made.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = made.decoders.ByteLevel()
    words = "To be, or not to be: naïve 東京 🎉\n" * 20
    alphabet = made.pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words], made.trainers.BpeTrainer(**options))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = vocabulary(str(tmp_path / "tokenizer.json"))
    assert (found.size, found.end) == (280, 0)
    for each in (words, "a text of none of its words, æøå 語\n\n  \t", ""):
        ((tokens, widths),) = found.encode([each.encode()])
        assert widths.sum() == len(each.encode()) and found.decode(tokens.tolist()) == each
    (tmp_path / "a.txt").write_text(words, encoding="utf-8")
    given = dict(files="*.txt", dir=str(tmp_path), tokenizer=str(tmp_path / "tokenizer.json"), window=6)
    dataset = text.text(**given, validation=0, test=0)
    for source in (dataset.open()["train"], dataset.open()["train"]):  # made, then from the cache
        batch = source.get(np.array([0, 1]))
        first = found.encode([words.encode()])[0][0][:7]
        np.testing.assert_array_equal(batch["tokens"][0], first)
        assert batch["bytes"][0] == len(found.decode(first[1:].tolist()).encode())
    with pytest.raises(UserError, match="is no tokenizer.json"):
        (tmp_path / "tokenizer.json").write_text("{}")
        vocabulary(str(tmp_path / "tokenizer.json"))


def test_without_the_package_a_tokenizer_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'jaxtrain\[text\]'"):
        vocabulary("tokenizer.json")


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (dict(), {0, 1, 2, 3}),
        (dict(top_k=2), {0, 1}),
        (dict(top_k=9), {0, 1, 2, 3}),
        (dict(top_p=0.5), {0}),
        (dict(top_p=0.51), {0, 1}),
        (dict(top_p=0.81), {0, 1, 2}),
        (dict(top_k=3, top_p=0.9), {0, 1, 2}),
        (dict(top_k=1, top_p=0.99), {0}),
    ],
)
def test_what_may_be_drawn(options, allowed):
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]], jnp.float32))
    found = Sampling(temperature=1.0, **options).allowed(logits)[0]
    assert set(np.flatnonzero(np.isfinite(found)).tolist()) == allowed
    drawn = Sampling(temperature=1.0, **options)(jax.random.key(0), jnp.tile(logits, (300, 1)))
    assert set(np.asarray(drawn).tolist()) == allowed
    assert Sampling(temperature=0.0, **options)(jax.random.key(0), logits).tolist() == [0]


def config_of(model):
    return tiny.config(
        model=model,
        task=dict(name="language_modelling"),
        best="loss",
        best_mode="min",
        devices=2,
        total="6st",
        eval_every="3st",
        report_every="3st",
        evals={"sample": dict(fn="sample", every="3st")},
        optimizer=dict(name="adamw", learning_rate=0.01),
    )


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return dict(name="text", files="a.txt", dir=str(tmp_path), window=16)


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL_GPT | dict(context=16), dict(name="rnn", width=8)])
def test_a_run_learns_writes_and_is_sampled_from(model, corpus, tmp_path, capsys):
    """A text in the log and a number in the metrics; then the command: twice the same, another seed another."""
    config = config_of(model)
    config.data = corpus
    result = train.run(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_sample/entropy" in line] == [3, 6]
    assert "eval_sample/text of step 6" in (tmp_path / "run" / "log.txt").read_text()
    assert result.metrics["eval/perplexity"] == pytest.approx(math.exp(result.metrics["eval/loss"]))
    assert result.metrics["eval/bits_per_byte"] == pytest.approx(result.metrics["eval/loss"] / math.log(2))

    sampler, prompt = Sampler(result.job, Sampling(temperature=0.0)), list(b"the quick")
    drawn = sampler.tokens(result.state, prompt)
    written = list(prompt)
    whole = jax.jit(lambda params, text: result.model.apply(params, {}, text, key=None, train=False)[0])
    for _ in range(7):  # until the room is full
        token, probability = next(drawn)
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(written)] = written
        logits = whole(result.params, padded)[0, len(written) - 1]
        assert token == int(jnp.argmax(logits))
        assert probability == pytest.approx(float(jax.nn.log_softmax(logits)[token]), abs=1e-3)
        written.append(token)
    for _ in range(20):  # and beyond it
        next(drawn)

    capsys.readouterr()
    assert (
        sample.main([f"--workdir={tmp_path / 'run'}", "--prompt=the ", "--tokens=20", "--seed=1", "--top_p=0.9"]) == 0
    )
    shown = capsys.readouterr().out
    sampler = Sampler(result.job, Sampling(top_p=0.9))
    texts = []
    for seed in (1, 2):
        drawn = sampler.tokens(result.state, list(b"the "), seed=seed)
        texts.append("the " + Bytes().decode([next(drawn)[0] for _ in range(20)]).split("\0")[0])
    assert shown == texts[0] + "\n" != texts[1] + "\n"
    assert sample.main([f"--workdir={tmp_path / 'run'}", "--prompt="]) == 2
    assert sample.main([f"--workdir={tmp_path / 'nothing'}"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "prompt" in errors[0] and "workdir" in errors[1]


def test_a_model_without_a_cache_is_not_sampled_from(corpus):
    config = config_of(dict(name="nets:Bigrams"))
    config.data = corpus
    job = train.build(config)
    with pytest.raises(UserError, match="room"):
        next(Sampler(job, Sampling()).tokens(job.initial(), [1]))
    job = train.build(tiny.config(), data=tiny.data())
    with pytest.raises(UserError, match="no tokens"):
        sample.words_of(job)


def test_gpt2_is_traced_at_full_size():
    """The whole step on half a million tokens, over eight devices: shapes only, nothing is allocated or compiled."""
    job = train.build(configs.load("configs/gpt2_124m.py", synthetic="yes"))
    assert job.abstract_batch["tokens"].shape == (480, 1025)
    assert sum(leaf.size for leaf in jax.tree.leaves(job.abstract.params)) == 124_439_808
    assert {"loss", "perplexity"} <= job.outcome.keys() and job.outcome["loss"].total.shape == ()


def test_an_evaluation_of_a_name_is_no_foreign_code():
    assert configs.own_names(configs.checked(config_of(SMALL_GPT))) == {}
    assert dataclasses.is_dataclass(lookup.resolve("language_modelling", lookup.TASKS, "task"))
