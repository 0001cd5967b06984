"""Text to train on: the documentation that is installed with Python, local files, or a dataset of the hub."""

import ast
import gc
import glob
import hashlib
import os
import re
import string
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.exceptions import DatasetGenerationError
from tqdm.auto import tqdm

INSTALLED_DOCS = "installed-docs"
MIN_CHARACTERS = 300
HELD_OUT_SHARE = 0.02
HELD_OUT_DOCUMENTS = 1000  # of a stream, whose length is unknown

ALL_BLANK = "the corpus is empty: every document is blank"

FILE_FORMATS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
HUB_NAME = re.compile(r"(?P<path>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.-]+))?")

SKIPPED_FOLDERS = re.compile(r"\..*|__pycache__|site-packages|dist-packages|tests?|licen[cs]es|asymloop_hf.*", re.I)
SKIPPED_DOCUMENTS = re.compile(
    r".*(licen[cs]e|copying|notice|authors|credits|requirements|top_level|entry_points|cmakelists|grammar).*", re.I
)
ASCII_LETTERS = string.ascii_letters.encode()
TRIPLE_QUOTES = re.compile(rb"\"\"\"|'''")
DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load_corpus(
    name: str,
    *,
    streaming: bool | None = None,
    held_out: float | int | None = None,
    seed: int = 0,
    text_column: str = "text",
) -> dict[str, Dataset | IterableDataset]:
    """Loads a corpus as two sets of documents, `"train"` and `"held_out"`, with one column, `text`.

    No text is in both sets. Blank documents are left out.

    - In memory (a `DatasetDict`): equal texts are kept once, and which set a text belongs to follows from a hash of
      the text and `seed`. With a share it stays there when the corpus is reordered or grows; a number of documents
      takes those with the lowest hashes, so that a corpus that grows can move some to the other side.
    - Streamed (a `dict`): `held_out` is a `Dataset` of the first documents, `train` an `IterableDataset` of all
      documents whose text is not among them.

    Args:
        name: `"installed-docs"` (see [`installed_docs`]); a local file or folder of .txt and .md, of .json and .jsonl,
            or of .parquet; or a dataset of the hub as `owner/name` or `owner/name:config`, of which the `train` split
            is read. A document is a row, a text file in a folder, or, in a single text file, a paragraph: what stands
            between blank lines.
        streaming: whether to read documents only as they are needed. `None`: for a dataset of the hub alone.
        held_out: how much to hold out: a share of the texts (a float between 0 and 1) or a number of documents (an
            int). `None`: 0.02, and 1,000 documents of a stream. A stream takes a number alone.
        seed: chooses the texts that are held out; a stream holds out its first documents under every seed.
        text_column: the column with the text, for files and datasets that have columns.

    Raises:
        FileNotFoundError: `name` is neither a local path nor a dataset that the hub gives.
        ValueError: a wrong `held_out`; a file that is not UTF-8, cannot be parsed or has an unknown extension; no such
            `text_column`; no documents at all, or too few to leave some on both sides.
    """
    if not isinstance(name, str):
        raise ValueError(f"corpus={name!r} is not allowed; it must be a string")
    documents = _open(name, streaming)
    if held_out is None:
        held_out = HELD_OUT_DOCUMENTS if isinstance(documents, IterableDataset) else HELD_OUT_SHARE
    _check_held_out(held_out, isinstance(documents, IterableDataset))
    documents = _only_text(documents, text_column, name)
    if isinstance(documents, IterableDataset):
        splits = _split_stream(documents, held_out)
    else:
        splits = _split_by_hash(documents, held_out, seed)
    for split, rows in splits.items():
        if next(iter(rows), None) is None:
            raise ValueError(
                f"held_out={held_out!r} leaves no document for {split!r} in the corpus {name!r}: "
                "each side needs at least one; hold out another amount or use a larger corpus"
            )
    return splits


def load_documents(name: str, *, text_column: str = "text") -> Iterator[dict]:
    """
    The documents of a corpus one after the other, none held out, as `{"text": ...}`; blank ones are left out.

    Args:
        name, text_column: as of [`load_corpus`].

    Raises:
        FileNotFoundError, ValueError: as [`load_corpus`] for a corpus that cannot be read.
    """
    documents = _only_text(_open(name, streaming=None), text_column, name)
    return _without_blank(documents, name)


def _without_blank(documents: Iterable[dict], name: str) -> Iterator[dict]:
    is_empty = True
    for row in documents:
        if not _is_blank(row["text"]):
            is_empty = False
            yield row
    if is_empty:
        raise ValueError(f"{ALL_BLANK}: {name!r}")


def installed_docs(paths: Iterable[str | os.PathLike] | None = None) -> Dataset:
    """English prose that is on every machine with Python: documentation files, package descriptions and docstrings.

    Reads, without importing anything, the .md, .rst and .txt files, the descriptions in package metadata and the
    docstrings of all installed packages but this one, and the docstrings of the standard library. Left out are
    licences, requirement lists, tests, files that cannot be read or parsed, texts of 300 characters or fewer, and
    texts that are not prose ([`is_prose`]). Equal texts are kept once. Rows are in the order of `paths` and, within
    one, of the file names, so that they depend on the installed files alone.

    Args:
        paths: the folders to search. `None`: the site-packages of this interpreter and its standard library.

    Returns:
        A `Dataset` with the columns `text` and `source`, the file's path below its folder.

    Raises:
        FileNotFoundError: one of `paths` is not a folder.
    """
    roots = _installation() if paths is None else [Path(path) for path in paths]
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"paths has {str(root)!r}, which is not a folder; each must be an existing folder")
    files = [(root, source) for root in roots for source in _files(root)]
    source_of = {}
    with _no_garbage_collection():
        for root, source in tqdm(files, desc="Reading installed documentation", unit="file"):
            for text in map(str.strip, _read_documents(root / source)):
                if len(text) > MIN_CHARACTERS and text not in source_of and is_prose(text):
                    source_of[text] = source
    return Dataset.from_dict(
        {"text": list(source_of), "source": list(source_of.values())},
        features=datasets.Features({"text": datasets.Value("string"), "source": datasets.Value("string")}),
    )


def is_prose(text: str) -> bool:
    """Whether a text reads as English prose: at least 90 % of its characters are ASCII, 60 % of those that are not
    white space are letters, and a line that is not blank has three words or more on average."""
    words = text.split()
    characters = sum(map(len, words))
    ascii_text = text.encode("ascii", "ignore")
    letters = len(ascii_text) - len(ascii_text.translate(None, ASCII_LETTERS))
    lines = sum(1 for line in text.splitlines() if line.strip())
    return len(ascii_text) >= 0.9 * len(text) and letters >= 0.6 * characters and len(words) >= 3 * lines


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees have no cycles, and searching their many nodes for some would double the time to parse."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _installation() -> list[Path]:
    site_packages = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [path for path in dict.fromkeys(site_packages) if path.is_dir()] + [Path(sysconfig.get_path("stdlib"))]


def _files(root: Path) -> list[str]:
    """The paths below `root`, with forward slashes and sorted, of the files that may hold documentation."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not SKIPPED_FOLDERS.fullmatch(name)]
        found += [Path(folder, name).relative_to(root).as_posix() for name in names if _may_document(name)]
    return sorted(found)


def _may_document(name: str) -> bool:
    if name.endswith((".md", ".rst", ".txt")):
        return not SKIPPED_DOCUMENTS.fullmatch(name)
    return name == "METADATA" or (name.endswith(".py") and not name.startswith("__editable__"))


def _read_documents(path: Path) -> list[str]:
    """The docstrings of a Python file, the description in a METADATA file, the whole of any other."""
    try:
        content = path.read_bytes()
        if path.suffix == ".py":
            return list(_docstrings(content))
        text = content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [text.partition("\n\n")[2] if path.name == "METADATA" else text]


def _docstrings(code: bytes) -> Iterator[str]:
    if not any(len(text) > MIN_CHARACTERS for text in TRIPLE_QUOTES.split(code)[1::2]):
        return  # parsing is what takes the time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        nodes = [ast.parse(code)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, DOCUMENTED_NODES):
            yield ast.get_docstring(node) or ""
        nodes.extend(reversed(getattr(node, "body", ())))


def _open(name: str, streaming: bool | None) -> Dataset | IterableDataset:
    if name == INSTALLED_DOCS:
        documents = installed_docs()
        return documents.to_iterable_dataset() if streaming else documents
    if os.path.exists(name):
        return _open_files(Path(name), bool(streaming))
    hub_name = HUB_NAME.fullmatch(name)
    if hub_name is None:
        raise FileNotFoundError(
            f"corpus={name!r} is neither an existing local path nor a hub name of the form owner/name or "
            f"owner/name:config, nor {INSTALLED_DOCS!r}"
        )
    try:
        return datasets.load_dataset(
            hub_name["path"], hub_name["config"], split="train", streaming=streaming is not False
        )
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"corpus={name!r} is not an existing local path, and the hub does not give a dataset of that name: {error}"
        ) from error


def _open_files(path: Path, streaming: bool) -> Dataset | IterableDataset:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if not _is_hidden(file, path))
    files = [file for file in files if file.is_file() and file.stat().st_size > 0]
    if not files:
        raise ValueError(f"corpus={str(path)!r} is an empty corpus: it has no file with content")
    formats = {FILE_FORMATS.get(file.suffix.lower()): file for file in files}
    if None in formats:
        raise ValueError(
            f"corpus={str(path)!r}: the file {str(formats[None])!r} has an unknown extension; "
            f"allowed are {', '.join(FILE_FORMATS)}"
        )
    if len(formats) > 1:
        raise ValueError(
            f"corpus={str(path)!r} mixes file formats ({', '.join(str(file) for file in formats.values())}); "
            "a folder must hold one: text (.txt, .md), JSON (.json, .jsonl) or .parquet"
        )
    (file_format,) = formats
    options = {}
    if file_format == "text":
        options |= {"sample_by": "paragraph" if path.is_file() else "document", "encoding": "utf-8-sig"}
    if file_format != "parquet":
        for file in files:
            _check_utf8(file)
    try:
        return datasets.load_dataset(
            file_format,
            data_files=[glob.escape(str(file)) for file in files],
            split="train",
            streaming=streaming,
            **options,
        )
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(
            f"corpus={str(path)!r} cannot be read as {file_format}: {error.__cause__ or error}"
        ) from error


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _check_utf8(file: Path) -> None:
    offset = 0
    with file.open("rb") as lines:
        for line in lines:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"the file {str(file)!r} is not UTF-8: byte 0x{line[error.start]:02x} at byte offset "
                    f"{offset + error.start} ({error.reason}); corpus files must be UTF-8"
                ) from error
            offset += len(line)


def _check_held_out(held_out: float | int, streamed: bool) -> None:
    is_count = isinstance(held_out, int) and not isinstance(held_out, bool) and held_out >= 1
    is_share = isinstance(held_out, float) and 0 < held_out < 1
    if not (is_count or (is_share and not streamed)):
        allowed = "a number of documents, an int of at least 1"
        if not streamed:
            allowed += ", or a share, a float between 0 and 1"
        raise ValueError(f"held_out={held_out!r} is not allowed for this corpus; it must be {allowed}")


def _only_text(documents: Dataset | IterableDataset, text_column: str, name: str) -> Dataset | IterableDataset:
    """`documents` with the one column `text`, after a check of the column on the first document."""
    try:
        first = next(iter(documents), None)
    except ValueError as error:
        raise ValueError(f"corpus={name!r} cannot be read: {error}") from error
    if first is None:
        raise ValueError(f"corpus={name!r} is an empty corpus: it has no documents")
    if text_column not in first:
        raise ValueError(
            f"text_column={text_column!r} is not a column of the corpus {name!r}; its columns are {', '.join(first)}"
        )
    if not isinstance(first[text_column], str | None):
        raise ValueError(
            f"text_column={text_column!r} of the corpus {name!r} holds {type(first[text_column]).__name__} values; "
            "it must hold strings"
        )
    documents = documents.select_columns([text_column])
    return documents if text_column == "text" else documents.rename_column(text_column, "text")


def _is_blank(text: str | None) -> bool:
    if not isinstance(text, str | None):
        raise ValueError(f"a document is {text!r}; every one must be a string or null")
    return text is None or not text.strip()


def _split_by_hash(documents: Dataset, held_out: float | int, seed: int) -> DatasetDict:
    row_of = {}
    for row, text in enumerate(documents["text"]):
        if not _is_blank(text):
            row_of.setdefault(_hash(text, seed), row)
    if not row_of:
        raise ValueError(ALL_BLANK)
    if isinstance(held_out, int):
        chosen = set(sorted(row_of)[:held_out])
    else:
        # At least one, so that a small corpus can be used too.
        chosen = {value for value in row_of if value < held_out * 2**128} or set(sorted(row_of)[:1])
    return DatasetDict(
        train=documents.select([row for value, row in row_of.items() if value not in chosen]),
        held_out=documents.select([row for value, row in row_of.items() if value in chosen]),
    )


def _hash(text: str, seed: int) -> int:
    """A number below 2**128 that depends on `text` and `seed` alone."""
    digest = hashlib.blake2b(f"{seed}:{text}".encode("utf-8", "surrogatepass"), digest_size=16)
    return int.from_bytes(digest.digest(), "big")


def _split_stream(documents: IterableDataset, held_out: int) -> dict[str, Dataset | IterableDataset]:
    documents = documents.filter(_is_not_blank, input_columns="text")
    texts = list(dict.fromkeys(row["text"] for row in documents.take(held_out)))
    if not texts:
        raise ValueError(ALL_BLANK)
    train = documents.filter(_is_not_in, input_columns="text", fn_kwargs={"texts": frozenset(texts)})
    return {"train": train, "held_out": Dataset.from_dict({"text": texts})}


def _is_not_blank(text: str | None) -> bool:
    return not _is_blank(text)


def _is_not_in(text: str, texts: frozenset[str]) -> bool:
    return text not in texts
