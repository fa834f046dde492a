"""What the command line may say: flags, `--config.key=value`, and the help that lists every key."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NoReturn, get_origin

from jaxtrain.config import lookup, schema
from jaxtrain.config.keys import KEYS, KINDS, Key
from jaxtrain.errors import UserError

MODES = ("train", "eval")
WIDTH = 110
EXAMPLES = """\
examples:
  python -m jaxtrain.main --config=configs/digits.py
  python -m jaxtrain.main --config=configs/digits.py:smoke --workdir=/tmp/digits
  python -m jaxtrain.main --config=configs/digits.py --config.total=5ep --config.model.width=64
  python -m jaxtrain.main --config=configs/digits.py --config.model=my_lab.nets:unet --config.model.depth=3

The same command resumes its run. Any key below is set with --config.KEY=VALUE; an option of a part (data,
model, optimizer, …) with --config.PART.OPTION=VALUE: options are the parameters of the builder that the part
names, and `--config=FILE --print` shows them all.

exit codes: 0 done; 2 a mistake, told in one line; 3 NaN or infinity; 4 a hang or a lost process; 5 storage;
130, 143 stopped by Ctrl-C, by SIGTERM or SIGUSR1
"""


def parse(argv: Sequence[str], parser: argparse.ArgumentParser | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the overrides as "key=value". Raises UserError, one line, for what is neither.

    `parser` is that of another command, which has a flag --config too.
    """
    parser = parser or _parser()
    flags, rest = parser.parse_known_args(list(argv))
    stray = next((place for place, each in enumerate(rest) if not _is_override(each)), None)
    if stray is not None:
        following = [each for each in rest[stray + 1 : stray + 2] if not each.startswith("-")]
        raise UserError(_explained(rest[stray], following, parser))
    if not flags.config:
        raise UserError(f"no config given: {parser.prog} --config=configs/digits.py (--help tells more)")
    return flags, [each.removeprefix("--config.") for each in rest]


def parse_flags(
    argv: Sequence[str], parser: argparse.ArgumentParser, required: Mapping[str, str]
) -> argparse.Namespace:
    """The flags of a command that takes no config. `required`: name → what to write for it.

    Raises UserError, one line, for a flag that there is not, and for one that is missing.
    """
    flags, rest = parser.parse_known_args(list(argv))
    if rest:
        known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        raise UserError(f"unknown argument {rest[0]!r}.{lookup.choices_hint(rest[0].partition('=')[0], known)}")
    usage = " ".join(f"--{name}={what}" for name, what in required.items())
    for name in required:
        if not getattr(flags, name):
            raise UserError(f"no {name} given: {parser.prog} {usage} (--help tells more)")
    return flags


def _is_override(argument: str) -> bool:
    return argument.startswith("--config.") and "=" in argument


def _explained(argument: str, following: list[str], parser: argparse.ArgumentParser) -> str:
    """What to write instead of an argument that is neither a flag nor an override."""
    name, equals, value = argument.partition("=")
    bare = name.removeprefix("--").removeprefix("config.")
    value = value if equals else "".join(following) or "…"
    if name.startswith("--config."):
        return f"{argument} has no value; write {argument}={value}"
    if name.startswith("config.") or bare.partition(".")[0] in KEYS:
        return f"{argument} sets nothing; write --config.{bare}={value}"
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    return f"unknown argument {argument!r}.{lookup.choices_hint(name, flags)}"


class Parser(argparse.ArgumentParser):
    """Mistakes are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removesuffix('.')}; --help tells more")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jaxtrain.main",
        description="Trains, resumes or evaluates what a config file describes.",
        epilog="\n".join([EXAMPLES, *map(_section, KINDS)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE[:ARGS]", help="ARGS reach its get_config: configs/digits.py:smoke")
    add("--workdir", metavar="DIR", default="", help="by default runs/<config>-<hash of the run keys>")
    add("--mode", metavar="train|eval", type=_mode, default="train", help="eval: evaluate a workdir")
    add("--print", action="store_true", help="show the resolved config and the parameters, and end")
    add(
        "--profile",
        metavar="START:STOP",
        type=_span,
        help="write a JAX trace of these steps into the workdir",
    )
    add("--debug", action="store_true", help="check every step for NaN")
    return parser


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"{text!r} is no mode.{lookup.choices_hint(text, MODES)}")
    return text


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no span of steps; write START:STOP, such as 20:25")
    return int(first), int(last)


def _section(kind: str) -> str:
    """The keys of one kind, each with its meaning, default and choices."""
    lines = [f"{kind} keys ({KINDS[kind]}):"]
    for key, about in KEYS.items():
        if about.kind == kind:
            text = textwrap.wrap(". ".join(_told(about)), WIDTH - 24, break_on_hyphens=False)
            lines += [f"  {key:<22}{text[0]}", *(" " * 24 + line for line in text[1:])]
    return "\n".join(lines) + "\n"


def _told(about: Key) -> Iterator[str]:
    yield about.doc
    if about.part is not None:
        yield f"Known: {', '.join(sorted(about.part.table))}"
    elif get_origin(about.annotation) is Literal:
        yield schema.describe(about.annotation).replace("one", "One", 1)
    default = about.default
    if isinstance(default, dict) and default:
        options = ", ".join(f"{name}={each!r}" for name, each in default.items() if name != "name")
        yield f"Default {default['name']}" + (f" with {options}" if options else "")
    else:
        yield f"Default {default!r}"
