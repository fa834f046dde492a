"""`config.initialise`: parameters set at step 0 by rules of their own, some of which look at the training data.

A builder returns `set(array, examples) -> array`. The array is the parameter as it was drawn, NumPy's, of kernels with
their outputs last; `examples(n)` gives the first n training examples as the model sees them, preprocessed and not
augmented. It is done on the host, so that the number of devices does not matter; a resumed run never comes here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import lookup
from jaxtrain.errors import JaxtrainError, UserError

Examples = Callable[[int], Mapping[str, np.ndarray]]
Setter = Callable[[np.ndarray, Examples], np.ndarray]


def dirac() -> Setter:
    """The first outputs of a convolution pass its inputs on: as many as there are of both; the other outputs stay.

    A kernel [height, width, in, out] becomes at its middle the identity. Zagoruyko and Komodakis, "DiracNets", 2017.
    """

    def setter(array: np.ndarray, examples: Examples) -> np.ndarray:
        if array.ndim < 3:
            raise UserError(
                f"it is no kernel of a convolution, but {list(array.shape)}; expected [height, width, in, out]"
            )
        *window, inputs, outputs = array.shape
        passed = min(inputs, outputs)
        new = array.copy()
        new[..., :passed] = 0
        new[(*(side // 2 for side in window), range(passed), range(passed))] = 1
        return new

    return setter


def unit_std() -> Setter:
    """The array divided by the standard deviation of its elements."""

    def setter(array: np.ndarray, examples: Examples) -> np.ndarray:
        # The deviation with n - 1 below, which is what PyTorch's is too.
        spread = np.std(array.astype(np.float64), ddof=1) if array.size > 1 else 0.0
        if not spread > 0:
            raise UserError(f"its elements, {array.size}, are all equal, and no scale makes their deviation 1")
        return (array / spread).astype(array.dtype)

    return setter


def whitening(examples: int = 5000, epsilon: float = 5e-4) -> Setter:
    """The first convolution as a filter that makes patches of the pictures white, each filter and its negative.

    Of the covariance of all patches [height · width · channels] in the first `examples` training pictures, the
    eigenvectors divided by sqrt(eigenvalue + epsilon), from the largest eigenvalue down; then the same negated. A
    kernel [height, width, channels, out] takes as many of them as it has outputs for: out is even, and at most twice
    the size of a patch. Coates and Ng, "Learning Feature Representations with K-Means", 2012; in this form Page, "How
    to Train Your ResNet", 2019.
    """
    if examples < 1 or not epsilon > 0:
        raise UserError(f"whitening: examples={examples}, epsilon={epsilon}, expected 1 or more and a number above 0")

    def setter(array: np.ndarray, first: Examples) -> np.ndarray:
        size = int(np.prod(array.shape[:-1]))
        half, odd = divmod(array.shape[-1], 2)
        if array.ndim != 4 or odd or half > size:
            raise UserError(
                f"it is {list(array.shape)}; whitening sets kernels [height, width, channels, out] with an even number "
                "of outputs, at most two for each element of a patch"
            )
        values, vectors = np.linalg.eigh(_covariance(_pictures(first(examples), array.shape), array.shape[:2]))
        order = np.argsort(values)[::-1][:half]
        # An eigenvector has no sign, and both are taken: the one is called first whose largest element is positive.
        vectors = vectors[:, order] / np.sqrt(np.maximum(values[order], 0) + epsilon)
        largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
        filters = (vectors * np.sign(largest)).reshape(*array.shape[:3], half)
        return np.concatenate([filters, -filters], axis=-1).astype(array.dtype)

    return setter


def applied(wanted: Sequence[Any], params: Mapping[str, np.ndarray], examples: Examples) -> dict[str, np.ndarray]:
    """path → array of the parameters that `config.initialise`, checked parts, sets; of `params`, all of them by path.

    Raises UserError for a part that matches nothing, or that a parameter it matches is not for.
    """
    found: dict[str, np.ndarray] = {}
    for number, part in enumerate(wanted):
        where = f"config.initialise[{number}]"
        options = lookup.checked(part, lookup.INITIALISER, where, fill=False)
        matched = lookup.matching(f"{where}.paths", options["paths"], list(params))
        setter = lookup.build_of(lookup.INITIALISER, options)
        for path in matched:
            old = found.get(path, params[path])
            try:
                new = setter(old, examples)
            except JaxtrainError as error:
                raise UserError(f"{where}: {options['name']} cannot set {path}: {error}") from error
            if new.shape != old.shape or new.dtype != old.dtype:
                raise UserError(
                    f"{where}: {options['name']} made of {path} {new.dtype}{list(new.shape)}, expected "
                    f"{old.dtype}{list(old.shape)}"
                )
            found[path] = new
    return found


def _pictures(batch: Mapping[str, np.ndarray], kernel: Sequence[int]) -> np.ndarray:
    """[N, H, W, C] in float64, at least as large as the kernel. Raises UserError where there are none."""
    image = batch.get("image")
    if image is None or image.ndim != 4 or image.shape[3] != kernel[2] or min(image.shape[1:3]) < max(kernel[:2]):
        shape = "no pictures" if image is None else f"pictures {list(image.shape)}"
        raise UserError(f"the data has {shape}, and the kernel is for [N, H, W, {kernel[2]}]")
    return image.astype(np.float64)


def _covariance(image: np.ndarray, window: Sequence[int]) -> np.ndarray:
    """Of all patches of a window's size: [n, n], n = height · width · channels, in the order of a kernel's axes."""
    (height, width), (rows, columns) = window, image.shape[1:3]
    shifted = [
        image[:, i : rows - height + 1 + i, j : columns - width + 1 + j].reshape(-1, image.shape[3])
        for i in range(height)
        for j in range(width)
    ]
    shifted = [each - each.mean(axis=0) for each in shifted]
    return np.block([[a.T @ b for b in shifted] for a in shifted]) / max(1, len(shifted[0]) - 1)
