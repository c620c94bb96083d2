"""What a user sees when something goes wrong: one line on stderr and an exit code, no traceback."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from dropmatch.cli.console import error_console, say
from dropmatch.errors import DropMatchError, SettingError

FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # the last two as shells report the signals
DEBUG = "DROPMATCH_DEBUG"


class Group(TyperGroup):
    """A group of commands whose failures become lines and exit codes.

    With DROPMATCH_DEBUG set, errors keep their traceback and no warning is hidden.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        debug = bool(os.environ.get(DEBUG))
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("default")
                warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                if debug:
                    raise
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                # the reader has gone; what is still buffered must not fail again at exit
                _drop_output()
                raise typer.Exit(BROKEN_PIPE) from None
            except (DropMatchError, OSError) as error:
                if debug:
                    raise
                say_error(_line(error))
                raise typer.Exit(MISUSED if isinstance(error, SettingError) else FAILED) from None


def say_error(message: str) -> None:
    """One `error:` line on stderr."""
    say(error_console(), "error: ", message, "bold red")


def say_warning(message: str) -> None:
    """One `warning:` line on stderr."""
    say(error_console(), "warning: ", message, "bold yellow")


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings of this package as one line each; those of libraries are not for the user."""
    if category.__module__.partition(".")[0] == "dropmatch":
        say_warning(str(message))


def _drop_output() -> None:
    """Send what is left of stdout nowhere."""
    with contextlib.suppress(OSError, ValueError):  # stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
