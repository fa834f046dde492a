"""Predictions of a trained model for files, as a table.

python -m jaxtrain.predict --workdir=runs/digits-1a2b3c4d --input=photos
"""

import argparse
import contextlib
import csv
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from jaxtrain import commandline, exits
from jaxtrain import main as entry
from jaxtrain.errors import StorageError

FLAGS = {
    "workdir": ("DIR", "of the run: a folder or URL"),
    "input": (
        "PATH",
        "what to predict on: a folder of pictures, a picture, .npy, .npz, .csv or .txt (a text in each line)",
    ),
    "output": ("FILE", "the CSV to write; by default it is printed"),
    "checkpoint": ("STEP", "of the checkpoint to take; by default the newest good one"),
    "member": ("NUMBER", "of the member, where config.replicas trained several"),
}
EXAMPLES = """\
A row for each example, in the order of names, rows or lines. A classification has label, class, and the probability of
each class; of another task, each number that it predicts is a column. Larger things, such as a map of labels, are one
cell, its numbers in rows.

exit codes: 0 written; 2 a mistake, told in one line; 5 storage
"""


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    flags = parse(argv)
    from jaxtrain.data import inputs
    from jaxtrain.result import load

    trained = load(flags.workdir, checkpoint=flags.checkpoint, trust=flags.trust).only(flags.member)
    size = trained.config.eval_batch_size or trained.config.batch_size
    rows = inputs.read(Path(flags.input), trained.job.dataset.spec, trained.config.data, size)
    with written(flags.output) as file:
        table = csv.writer(file, lineterminator="\n")
        for number, (names, batch) in enumerate(rows):
            found = columns(trained.predict(batch), trained.class_names)
            if not number:
                table.writerow(["input", *found])
            table.writerows(zip(names, *found.values(), strict=True))
    return 0


def columns(predictions: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, list[Any]]:
    """Title → cells, of predictions [N, ...]; classes by their names where those are known."""
    found: dict[str, list[Any]] = {}
    for name, array in predictions.items():
        if array.ndim == 1:
            found[name] = [cell(value) for value in array]
            if name == "label" and class_names:
                found["class"] = [class_names[value] for value in array]
        elif array.ndim == 2:
            titles = class_names if len(class_names) == array.shape[1] else range(array.shape[1])
            found |= {f"{name}_{title}": [cell(v) for v in array[:, k]] for k, title in enumerate(titles)}
        else:
            title = f"{name}[{'x'.join(map(str, array.shape[1:]))}]"
            found[title] = [" ".join(cell(value) for value in row.ravel()) for row in array]
    return found


def cell(value: Any) -> str:
    """A number as text that reads back as the same number."""
    return f"{value:.9g}" if np.issubdtype(value.dtype, np.floating) else str(value)


@contextlib.contextmanager
def written(path: str) -> Iterator[TextIO]:
    """A file that appears whole, or not at all; "" is the standard output."""
    if not path:
        yield sys.stdout
        return
    partial = Path(f"{path}.partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another --output") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises UserError, one line, for a mistake."""
    parser = commandline.Parser(
        prog="python -m jaxtrain.predict",
        description="Predictions of a trained model for files, as a table.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, (what, about) in FLAGS.items():
        number = {"type": int, "default": None} if name in ("checkpoint", "member") else {"default": ""}
        parser.add_argument(f"--{name}", metavar=what, help=about, **number)
    parser.add_argument("--trust", action="store_true", help="import the code outside jaxtrain that the run names")
    return commandline.parse_flags(argv, parser, {"workdir": "DIR", "input": "PATH"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


def command() -> NoReturn:
    """The process as a whole."""
    exits.on_signal()
    sys.exit(main())


if __name__ == "__main__":
    command()
