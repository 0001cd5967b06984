"""A byte-level BPE tokenizer, trained on the corpus at hand."""

from collections.abc import Iterable, Iterator
from itertools import chain

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = [END_OF_TEXT, PAD]
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    model_max_length: int | None = None,
    max_characters: int = 50_000_000,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, as GPT-2's: every string is encoded, without loss and without unknown tokens.

    `<|endoftext|>` is both the end-of-sequence and the beginning-of-sequence token, `<|pad|>` the padding token.
    Encoding adds neither. The same texts give the same tokenizer.

    Args:
        texts: the texts to train on, read once.
        vocab_size: tokens in the vocabulary: the special tokens, the 256 bytes and the learned merges. Fewer come
            out when `texts` has too few different words; `len(tokenizer)` tells.
        model_max_length: tokens from which on the tokenizer warns that a text is too long. `None`: never.
        max_characters: stop reading `texts` after this many characters, so that a stream of any length will do.
            With 10 million, a quarter of the installed documentation, texts took 1 % more tokens.

    Raises:
        ValueError: `vocab_size` is below 258, `max_characters` below 1, or `texts` has no text.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is too small; it must be at least {MIN_VOCAB_SIZE}: "
            f"256 bytes and {len(SPECIAL_TOKENS)} special tokens"
        )
    if max_characters < 1:
        raise ValueError(f"max_characters={max_characters} must be at least 1")
    texts = _up_to(max_characters, filter(None, texts))
    first_text = next(texts, None)
    if first_text is None:
        raise ValueError("texts has no text; it must hold at least one string that is not empty")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain([first_text], texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _up_to(max_characters: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text[:max_characters]
        max_characters -= len(text)
        if max_characters <= 0:
            return


def load_tokenizer(checkpoint: str, field: str = "checkpoint") -> PreTrainedTokenizerBase:
    """
    The tokenizer of a checkpoint.

    Args:
        field: what the error calls it.

    Raises:
        `ValueError`: it has none that can be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{field}={checkpoint!r} is not allowed: it has no tokenizer ({reason}).") from error
