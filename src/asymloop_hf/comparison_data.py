"""The data that all runs of a comparison share, made once: a tokenizer, blocks to train on, and held-out text."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset, IterableDataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .corpus import load_corpus
from .packing import pack, tokenize_documents
from .sizes import Size
from .tokenizer import train_tokenizer
from .whole_writes import writing

DATA = "data"
TOKENIZER, TRAIN, HELD_OUT, DOCUMENTS = "tokenizer", "train", "held_out", "held_out_documents"
HELD_OUT_BLOCKS = 64  # for the loss along a run
HELD_OUT_TOKENS = 100_000  # of whole documents, for the perplexity in the end


def prepare_data(output: Path, corpus: str, size: Size, num_blocks: int) -> None:
    """
    Write `tokenizer`, `train` (exactly `num_blocks` blocks), `held_out` (blocks) and `held_out_documents` to
    `output/data`, which appears when it is whole. What is there already is kept.

    Raises:
        `ValueError`: the corpus has too few tokens.
        `FileNotFoundError`: there is no such corpus.
    """
    folder = output / DATA
    if folder.exists():
        return
    texts = load_corpus(corpus)
    if isinstance(texts["train"], Dataset):
        texts = {split: documents.shuffle(seed=0) for split, documents in texts.items()}
    tokenizer = train_tokenizer((row["text"] for row in texts["train"]), size.vocab_size)
    blocks = {split: pack(documents, tokenizer, size.block_size) for split, documents in texts.items()}
    train = _first(blocks["train"], num_blocks)
    if len(train) < num_blocks:
        raise ValueError(
            f"tokens={num_blocks * size.block_size:,} are not allowed with corpus={corpus!r}: it has "
            f"{len(train) * size.block_size:,} tokens to train on, and no token is read twice."
        )
    documents = Dataset.from_dict({"input_ids": list(_first_documents(texts["held_out"]["text"], tokenizer))})
    with writing(folder) as partial:
        tokenizer.save_pretrained(partial / TOKENIZER)
        train.save_to_disk(partial / TRAIN)
        _first(blocks["held_out"], HELD_OUT_BLOCKS).save_to_disk(partial / HELD_OUT)
        documents.save_to_disk(partial / DOCUMENTS)


def load_data(output: Path) -> tuple[PreTrainedTokenizerBase, dict[str, Dataset], list[list[int]]]:
    """What [`prepare_data`] wrote: tokenizer, blocks to train on and held-out blocks, tokens of held-out documents."""
    folder = output / DATA
    blocks = {split: load_from_disk(str(folder / split)) for split in (TRAIN, HELD_OUT)}
    documents = load_from_disk(str(folder / DOCUMENTS))["input_ids"]
    return AutoTokenizer.from_pretrained(folder / TOKENIZER), blocks, documents


def _first(rows: Dataset | IterableDataset, count: int) -> Dataset:
    if isinstance(rows, Dataset):
        return rows.select(range(min(count, len(rows))))
    return Dataset.from_generator(lambda: iter(rows.take(count)), features=rows.features)


def _first_documents(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The tokens of each text with its end, as in packing, until there are enough."""
    left = HELD_OUT_TOKENS
    for text in texts:
        if left <= 0:
            return
        tokens = tokenize_documents([text], tokenizer)[0][:left]
        left -= len(tokens)
        yield tokens
