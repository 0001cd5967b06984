"""Packed tokens on disk: a corpus is tokenised once, and read from a folder by all later runs."""

import json
from pathlib import Path

from datasets import Dataset, IterableDataset
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .whole_writes import writing

ABOUT = "about.json"
TOKENIZER = "tokenizer"


def lock_of(folder: str) -> FileLock:
    """Held while a folder is made, so that of several runs one makes it and the others wait for it."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f".{folder.name}.lock"))


def save_tokens(
    folder: str, blocks: dict[str, Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase, about: dict
) -> None:
    """
    Write what [`pack`] gives to a folder, with the tokenizer. The folder appears under its name once it is complete.

    Args:
        folder: a new one.
        blocks: by split, `"train"` among them; streams are read to their end.
        about: what the blocks were made from; [`load_tokens`] compares it.

    Raises:
        `RuntimeError`: the blocks could not be read to their end or written, for example because a download broke off.
    """
    folder = Path(folder)
    try:
        with writing(folder) as partial:
            partial.mkdir(parents=True)
            counts = {split: _write(partial / f"{split}.arrow", rows) for split, rows in blocks.items()}
            tokenizer.save_pretrained(partial / TOKENIZER)
            streamed = isinstance(blocks["train"], IterableDataset)
            text = json.dumps({**about, "streamed": streamed, "blocks": counts}, indent=2) + "\n"
            (partial / ABOUT).write_text(text, encoding="utf-8")
    except Exception as error:
        raise RuntimeError(
            f"tokens_dir={str(folder)!r} was not written: {error}. The same command starts it again"
        ) from error


def _write(path: Path, blocks: Dataset | IterableDataset) -> int:
    with ArrowWriter(path=str(path), features=blocks.features) as writer:
        for batch in blocks.with_format("arrow").iter(batch_size=1000):
            writer.write_table(batch)
        num_blocks, _ = writer.finalize()
    return num_blocks


def load_tokens(
    folder: str, about: dict, tokenizer: PreTrainedTokenizerBase | None = None, num_blocks: int = 0
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase]:
    """
    The blocks of a folder that [`save_tokens`] has written, by split, and its tokenizer.

    Args:
        about: what the blocks must have been made from.
        tokenizer: what they must have been tokenised with; `None` for any.
        num_blocks: how many blocks of a stream's beginning there must be to train on. A whole corpus may have fewer.

    Raises:
        `ValueError`: the folder was made from something else, which is named, is too small, or is not such a folder.
    """
    folder = Path(folder)
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        own = AutoTokenizer.from_pretrained(folder / TOKENIZER)
        blocks = {split: Dataset.from_file(str(folder / f"{split}.arrow")) for split in found["blocks"]}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokens_dir={str(folder)!r} has no tokens that can be read: {error}") from error
    for name, value in about.items():
        if found.get(name) != value:
            raise ValueError(f"tokens_dir={str(folder)!r} was made with {name}={found.get(name)!r}, not {value!r}")
    if tokenizer is not None and tokenizer.get_vocab() != own.get_vocab():
        raise ValueError(
            f"tokens_dir={str(folder)!r} was made with another tokenizer, of {len(own)} tokens, "
            f"than tokenizer={tokenizer.name_or_path!r}, of {len(tokenizer)}"
        )
    if found["streamed"] and len(blocks["train"]) < num_blocks:
        raise ValueError(
            f"tokens_dir={str(folder)!r} holds {len(blocks['train'])} blocks to train on, and the run needs "
            f"{num_blocks}: train on fewer tokens, or choose a new folder"
        )
    return blocks, own
