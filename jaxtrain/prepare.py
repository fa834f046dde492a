"""Makes a TFDS data set ready to be read by record number: downloads, converts or checks it.

python -m jaxtrain.prepare --data.dataset=cifar10
"""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import commandline
from jaxtrain import main as entry
from jaxtrain.data import convert, host, tfds_builder
from jaxtrain.data.damage import Damage
from jaxtrain.data.pictures import Pictures
from jaxtrain.data.tfds import data_folder, open_records, open_split
from jaxtrain.errors import UserError

BLOCK = 64  # records checked at a time
DATA_FLAGS = {
    "dataset": "name as tfds takes it: name, name/config or name:1.2.3",
    "dir": "folder of TFDS sets; by default $TFDS_DATA_DIR, else ~/tensorflow_datasets",
    "version": "of the set, where it is not the newest",
    "image": "feature that is the picture (image)",
    "label": "feature that is the label (label)",
}
EXAMPLES = """\
examples:
  python -m jaxtrain.prepare --data.dataset=cifar10                    # download and prepare it, if it is not there
  python -m jaxtrain.prepare --data.dataset=mine --to=/data/converted  # compressed or plain TFRecord to ArrayRecord
  python -m jaxtrain.prepare --data.dataset=cifar10 --check            # read every record, decode every picture

A conversion that is cut off leaves nothing that looks like a set; start it again.

exit codes: 0 ready, or sound; 2 a mistake, or damaged records, told in one line each; 5 storage
"""


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    flags = parse(argv)
    folder = data_folder(flags.dir)
    builder = tfds_builder.find(flags.dataset, folder, flags.version)
    if not tfds_builder.is_prepared(builder):
        known = importlib.util.find_spec("array_record") is not None  # not on macOS
        tfds_builder.fetch(builder, flags.dataset, folder, file_format="array_record" if known else "tfrecord")
    if flags.to:
        folder = data_folder(flags.to)
        converted(builder, data_folder(flags.dir), folder)
        builder = tfds_builder.find(flags.dataset, folder, flags.version)
    if flags.check:
        check(builder, flags.dataset, folder, flags.image, flags.label)
    sizes = [f"{len(open_records(builder, flags.dataset, folder, name)):,} {name}" for name in builder.info.splits]
    print(f"{flags.dataset} is ready in {builder.data_dir}: {', '.join(sizes)} ({builder.info.file_format.value})")
    if flags.to:
        print(f"use it with --config.data.dir={folder}")
    return 0


def converted(builder: Any, folder: str, target: str) -> Path:
    """The set as ArrayRecord below `target`, with a bar on a terminal."""
    total = sum(split.num_examples for split in builder.info.splits.values())
    with bar(f"converting {builder.name}", total) as told:
        return convert.convert(builder, folder, target, told)


def check(builder: Any, dataset: str, folder: str, image: str, label: str) -> None:
    """Reads every record and decodes its picture. Raises UserError after all damaged ones were told."""
    found = total = 0
    for split in builder.info.splits:
        source = open_split(builder, dataset, folder, split, image, label, Damage(sys.maxsize))
        total += len(source)
        with bar(f"checking {source.name}", len(source)) as told:
            for line in damaged(source, builder.info.features[label].num_classes, told):
                found += 1
                print(line, flush=True)
    if found:
        raise UserError(f"{found:,} of {total:,} records of {dataset} are damaged, see above: prepare or copy it again")
    print(f"{total:,} records of {dataset} are sound")


def damaged(source: Pictures, classes: int, told: Callable[[int], None]) -> Iterator[str]:
    """A line for each example that cannot be learnt from."""
    steps = -(-len(source) // BLOCK)

    def plan(step: int) -> np.ndarray:
        return np.arange(step * BLOCK, min((step + 1) * BLOCK, len(source)))

    for step, batch in enumerate(host.batches(source, plan, 0, steps, kind="threads")):
        yield from source.damage.news()
        labels, ids = batch["label"], plan(step)
        for row in np.flatnonzero((labels < 0) | (labels >= classes)).tolist():
            yield f"{source.describe(ids[row])} has label {labels[row]}, expected 0 to {classes - 1}"
        told(len(ids))


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, none elsewhere; it moves by what the function is called with, from any thread."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises UserError, one line, for a mistake."""
    parser = commandline.Parser(
        prog="python -m jaxtrain.prepare",
        description="Makes a TFDS data set ready to be read by record number.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, about in DATA_FLAGS.items():
        default = {"image": "image", "label": "label"}.get(name, "")
        parser.add_argument(f"--data.{name}", metavar="TEXT", dest=name, default=default, help=about)
    parser.add_argument("--to", metavar="DIR", default="", help="copy the set as ArrayRecord below this folder")
    parser.add_argument("--check", action="store_true", help="read every record and decode its picture")
    flags = commandline.parse_flags(argv, parser, {})
    if not flags.dataset:
        raise UserError(f"no data set given: {parser.prog} --data.dataset=cifar10 (--help tells more)")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
