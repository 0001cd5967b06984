"""Documents of any length, packed into blocks of one length."""

from functools import partial
from itertools import chain

import numpy as np
from datasets import Dataset, Features, IterableDataset, Sequence, Value
from transformers import PreTrainedTokenizerBase

DOCUMENTS_PER_CUT = 1000
COLUMNS = ("input_ids", "position_ids", "labels")


def pack(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Tokenizes documents, ends each with the end-of-sequence token, and cuts their concatenation into blocks.

    Each block is a row of three columns of `block_size` integers:

    - `input_ids`: the tokens;
    - `position_ids`: a token's distance from the first token of its document or, where the document began in an
      earlier block, of the block. Transformers reads from them where documents begin and keeps attention inside
      each, provided that it gets no `attention_mask` and `use_cache=False`, which is what `Trainer` sets;
    - `labels`: the tokens, and -100 for the first of each document, so that no document predicts the next one.
      Transformers' models shift them.

    Documents are concatenated 1,000 at a time, and what is left of these after the last whole block, at most
    `block_size - 1` tokens, is dropped. The blocks do not depend on `num_proc`, and a stream gives those of the same
    documents in memory.

    Args:
        dataset: the documents, in a column `text`. An `IterableDataset` gives an `IterableDataset`.
        tokenizer: must have an `eos_token`; adds no other special token.
        block_size: tokens in a block.
        num_proc: processes that tokenize; a stream takes none.

    Raises:
        ValueError: `block_size` is below 2, `tokenizer` has no `eos_token`, `dataset` has no documents or no column
            `text`, its documents fill not even one block, or a stream comes with `num_proc`.
    """
    streamed = isinstance(dataset, IterableDataset)
    if block_size < 2:
        raise ValueError(f"block_size={block_size} is too small; it must be at least 2")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "tokenizer.eos_token=None is not allowed; a tokenizer with an eos_token must end the documents"
        )
    if streamed and num_proc is not None:
        raise ValueError(f"num_proc={num_proc} is not allowed for an IterableDataset; it must be None")
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("dataset has no documents; it must have at least one")
    if "text" not in first:
        raise ValueError(f"dataset has the columns {', '.join(first)}; it must have a column 'text'")

    tokenize = partial(_tokenize, tokenizer=tokenizer)
    cut = partial(_cut, block_size=block_size)
    documents = dataset.select_columns(["text"])
    if streamed:
        tokens = documents.map(tokenize, batched=True, remove_columns=["text"])
        return tokens.map(cut, batched=True, batch_size=DOCUMENTS_PER_CUT, features=_features(block_size))
    tokens = documents.map(tokenize, batched=True, remove_columns=["text"], num_proc=num_proc, desc="Tokenizing")
    blocks = tokens.map(
        cut,
        batched=True,
        batch_size=DOCUMENTS_PER_CUT,
        remove_columns=["input_ids"],
        features=_features(block_size),
        desc="Packing",
    )
    if len(blocks) == 0:
        raise ValueError(f"block_size={block_size} is too large: the {len(documents)} documents do not fill one block")
    return blocks


def _features(block_size: int) -> Features:
    return Features({column: Sequence(Value("int32"), length=block_size) for column in COLUMNS})


def tokenize_documents(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of each text, with the end of a document after them."""
    documents = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [tokens + [tokenizer.eos_token_id] for tokens in documents]


def _tokenize(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    return {"input_ids": tokenize_documents(batch["text"], tokenizer)}


def _cut(batch: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Cuts the documents of a batch into blocks; drops the tokens after the last whole one."""
    documents = batch["input_ids"]
    tokens = np.fromiter(chain.from_iterable(documents), dtype=np.int32)
    lengths = [len(document) for document in documents]
    index = np.arange(len(tokens))
    document_start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    block_start = index // block_size * block_size
    columns = {
        "input_ids": tokens,
        "position_ids": index - np.maximum(document_start, block_start),
        "labels": np.where(index == document_start, -100, tokens),
    }
    blocks = len(tokens) // block_size
    return {
        name: column[: blocks * block_size].reshape(blocks, block_size).tolist() for name, column in columns.items()
    }
