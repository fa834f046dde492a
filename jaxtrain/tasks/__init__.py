"""What is learnt. A task turns a model's outputs and a batch into losses and metrics."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jaxtrain.metrics import Metrics


class Task(Protocol):
    """The contract. B is the global batch; all but `check` are pure and traced, none is jitted by itself.

    A task is built by name (`jaxtrain.config.lookup.TASKS`) or as "package.module:attribute"; its options are the
    keyword arguments of the builder, less `num_classes`, which comes from the data set.
    """

    def inputs(self, batch: Mapping[str, jax.Array]) -> Any:
        """What the model is applied to: an array or a tree of arrays, each of leading dimension B.

        A task whose outputs are no scores of classes says by an attribute `num_outputs`, an int, what the model is
        built with in the place of the data set's `num_classes`.
        """

    def losses(self, outputs: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        """The training loss of each example, float32 [B], smoothing and mixed labels included.

        Example by example, never a mean: the step divides by the examples of the global batch, so that
        padding, accumulation and the number of devices do not weigh. Combine with `where(mask, losses, 0)`; a
        product would let the NaN of a padded row through. A task whose loss couples examples (contrastive)
        returns one float32 [] for the whole global batch; gradient accumulation refuses it.

        A task whose examples hold several items each (tokens, pixels), as many as there are valid ones, returns their
        sum, and has a method `counts(batch) -> int32 [B]` that says how many they are: the step then divides by the
        items of the global batch.
        """

    def metrics(self, outputs: Any, batch: Mapping[str, jax.Array], mask: jax.Array) -> Metrics:
        """Name → monoid over the examples where `mask`, bool [B], is true; whatever stands in the others.

        Holds "loss", comparable between training and evaluation (so without smoothing). Evaluation adds
        "examples", by which it proves that it saw each example once.
        """

    def predict(self, outputs: Any) -> dict[str, jax.Array]:
        """What a user of the model wants to see, each array of leading dimension B."""

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """Raise UserError naming ids if this host batch cannot be learnt from (a label out of range)."""
