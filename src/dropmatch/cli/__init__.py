"""The command line: `dropmatch generate`, `compare`, `models` and `rules`."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command that the arguments name, and exit."""
    from dropmatch.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the encoding lacks must not end a text
    app(prog_name="dropmatch")
