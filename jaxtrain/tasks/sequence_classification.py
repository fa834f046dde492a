"""One label out of K for each text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.metrics import Metrics
from jaxtrain.tasks.classification import Batch, Classification
from jaxtrain.tasks.confusion import Confusion


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MacroF1(Confusion):
    """The confusion matrix's counts; computes to the mean over classes of F1 = 2 · hits / (predicted + true).

    A class that is neither predicted nor true has no F1 and does not count; where there is none at all, NaN.
    """

    def compute(self) -> Any:
        counts = np.asarray(self.counts, np.int64)
        both = counts.sum(axis=0) + counts.sum(axis=1)
        shares = 2 * np.diagonal(counts)[both > 0] / both[both > 0]
        return float(shares.mean()) if len(shares) else math.nan


@dataclass(frozen=True, kw_only=True)
class SequenceClassification(Classification):
    """`Classification` of texts: `tokens` integers [B, T], of which the first `length` int32 [B] are text.

    What stands behind them is padding: the model gets both, and none that comes with jaxtrain lets padding weigh.
    """

    def inputs(self, batch: Batch) -> Any:
        """{"tokens": [B, T], "length": [B]}."""
        if missing := [name for name in ("tokens", "length") if name not in batch]:
            raise UserError(f"sequence classification: needs batch[{missing[0]!r}], found {', '.join(batch)}")
        return {"tokens": batch["tokens"], "length": batch["length"]}

    def metrics(self, outputs: jax.Array, batch: Batch, mask: jax.Array) -> Metrics:
        """Those of classification, and macro_f1."""
        guessed = self.predict(outputs)["label"]
        f1 = MacroF1.of(batch["label"], guessed, mask, self.num_classes)
        return super().metrics(outputs, batch, mask) | {"macro_f1": f1}

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """As of classification; also refuses a `length` outside 0..T."""
        super().check(batch)
        length, size = batch["length"], batch["tokens"].shape[1]
        bad = ((length < 0) | (length > size)) & batch.get("mask", np.True_)
        if bad.any():
            row = int(np.argmax(bad))
            number = batch.get("id", np.arange(len(length)))[row]
            raise UserError(
                f"sequence classification: example {number} has length {length[row]}, expected 0 to {size}, the tokens "
                "it holds: mend the data set"
            )
