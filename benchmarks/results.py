"""RESULTS.md: the latest table of every benchmark, each under the date and the machine that it was measured on."""

import re
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
HEAD = """# Benchmarks

The latest of each, written by `python -m benchmarks --save [NAME …]`, which wants an idle machine. Ratios
are medians of rounds in which both sides took turns; what each compares is in the docstring of `benchmarks/NAME.py`.
"""


def save(tables: Mapping[str, str], machine: str, path: Path = RESULTS) -> None:
    """Replaces the sections of these benchmarks; the others stay as they are."""
    there = _sections(path.read_text()) if path.exists() else {}
    there |= {name: f"{machine}\n\n{table}" for name, table in tables.items()}
    path.write_text("\n".join([HEAD, *(f"## {name}\n\n{text}\n" for name, text in sorted(there.items()))]))


def _sections(text: str) -> dict[str, str]:
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return {name.strip(): body.strip() for name, _, body in (part.partition("\n") for part in parts)}
