"""Options that several subcommands have, and how their values are read."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER_ERRORS = (ValueError, OSError)


@contextmanager
def errors_in_a_line(program: str) -> Iterator[None]:
    """End a script that meets what its user can mend with one line and status 2, without a traceback."""
    try:
        yield
    except (*USER_ERRORS, RuntimeError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be a positive integer")
    return int(text)


def add_loop_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-loops",
        type=lambda text: [positive_int(count) for count in text.split(",")],
        help="loop counts, such as 1,2,4 (default: the trained one)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: the GPU if there is one)")


def check_new_file(output: Path | None) -> None:
    """
    Raises:
        `ValueError`: the file exists, or its folder does not, or nothing can be written there.
    """
    if output is None:
        return
    if output.exists():
        raise ValueError(f"output={str(output)!r} is not allowed: the file exists.")
    if not output.parent.is_dir():
        raise ValueError(f"output={str(output)!r} is not allowed: its folder must exist.")
    try:
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise ValueError(
            f"output={str(output)!r} is not allowed: its folder cannot be written to ({error})."
        ) from error
