"""The weights of a run under the names that PyTorch's libraries have for them, as a safetensors file.

python -m jaxtrain.export --workdir=runs/resnet-1a2b3c4d --output=model.safetensors
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from jaxtrain import commandline, exits
from jaxtrain import main as entry
from jaxtrain.config import lookup
from jaxtrain.errors import UserError
from jaxtrain.weights import families, files, names

if TYPE_CHECKING:
    from jaxtrain.result import Trained

FLAGS = {
    "workdir": ("DIR", "of the run: a folder or URL"),
    "output": ("FILE", "to write, FILE.safetensors"),
    "format": ("NAME", "whose names the tensors get; by default the first of the model's below"),
    "member": ("NUMBER", "of the member, where config.replicas trained several"),
    "checkpoint": ("STEP", "of the checkpoint to take; by default the newest good one"),
}
EPILOG = """\
formats by model: {formats}

In PyTorch: model.load_state_dict(safetensors.torch.load_file(FILE)). The weights are those that evaluation uses, the
averaged ones where there are any. config.init_from=FILE reads them back, bit for bit.

exit codes: 0 written; 2 a mistake, told in one line; 5 storage
"""


def exported(trained: "Trained", format: str = "") -> dict[str, np.ndarray]:
    """Name → tensor as PyTorch has them, of a result or of what `jaxtrain.load` gives.

    Raises UserError for a model that has no map of names, another format than it has, or an option that the format
    does not know.
    """
    from jaxtrain.adapters.functional import named

    if "model" in trained.job.objects:
        raise UserError(f"names are known for the models of config.model, not for {trained.job.objects['model']}")
    name, _ = lookup.split(trained.config.model)
    known = families.formats(name)
    if format and format not in known:
        raise UserError(f"model {name!r} has no format {format!r}.{lookup.choices_hint(format, known)}")
    library = known[format or next(iter(known))]
    ours = {key: np.asarray(leaf) for key, leaf in named(trained.weights).items()}
    entries = library.entries(ours)
    found = names.exported(entries, ours)
    for key, array in names.imported(entries, found).items():
        if array.shape != ours[key].shape:
            raise UserError(
                f"{library.library} has no such {key}, {list(ours[key].shape)}: it shares a tensor of equal parts"
            )
    return found


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    flags = parse(argv)
    from jaxtrain.result import load

    trained = load(flags.workdir, checkpoint=flags.checkpoint, trust=flags.trust).only(flags.member)
    found = exported(trained, flags.format)
    files.write(Path(flags.output), found)
    size = sum(tensor.nbytes for tensor in found.values())
    print(f"{flags.output}: {len(found):,} tensors, {size / 1e6:,.1f} MB, of step {int(trained.state.step):,}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises UserError, one line, for a mistake."""
    known = "; ".join(f"{model}: {', '.join(formats)}" for model, formats in families.FAMILIES.items())
    parser = commandline.Parser(
        prog="python -m jaxtrain.export",
        description="Writes the weights of a run under the names that PyTorch's libraries have for them.",
        epilog=EPILOG.format(formats=known),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, (what, about) in FLAGS.items():
        number = {"type": int, "default": None} if name in ("checkpoint", "member") else {"default": ""}
        parser.add_argument(f"--{name}", metavar=what, help=about, **number)
    parser.add_argument("--trust", action="store_true", help="import the code outside jaxtrain that the run names")
    flags = commandline.parse_flags(argv, parser, {"workdir": "DIR", "output": "FILE"})
    if Path(flags.output).suffix != ".safetensors":
        raise UserError(f"--output={flags.output} is no name of a safetensors file; write {flags.output}.safetensors")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


def command() -> NoReturn:
    """The process as a whole."""
    exits.on_signal()
    sys.exit(main())


if __name__ == "__main__":
    command()
