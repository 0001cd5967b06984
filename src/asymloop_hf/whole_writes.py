"""Files and folders that are never half written: they appear under their name once they are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A path beside it to write the file or folder `path` to: it gets that name once the block is through."""
    partial = path.with_name(f".writing-{path.name}")
    _remove(partial)  # of a process that was killed
    try:
        yield partial
        os.replace(partial, path)
    finally:
        _remove(partial)


def write_whole(path: Path, text: str) -> None:
    """Write a text file, in UTF-8."""
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
