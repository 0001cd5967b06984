"""Held-out perplexity of a looped model: token-weighted, by document, by position, and at several loop counts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from .loop_logits import LOOPED, logits_by_loops

FIRST_BUCKET = 16  # positions; each later bucket of positions ends at twice the position
WINDOWS_PER_SORT = 64  # batches whose windows are sorted by length, so that little is padded


@dataclass
class Bucket:
    """
    The mean loss of some tokens.

    Args:
        tokens: how many were predicted.
        loss: their mean cross-entropy in nats, `nan` without a token.
    """

    tokens: int
    loss: float


@dataclass
class Perplexity:
    """
    What a model predicts of documents.

    Args:
        tokens: how many were predicted: all but the first of each document.
        loss: cross-entropy in nats per token, every token with the same weight.
        perplexity: `exp(loss)`.
        documents: tokens and loss of each document, in their order; one of a single token has none to predict.
        positions: tokens and loss of the tokens at the positions from `start` of their document up to the next
            `start`, the last without an end: `{start: bucket}`, of the starts 1, 16, 32, 64, ...
    """

    tokens: int
    loss: float
    perplexity: float
    documents: list[Bucket]
    positions: dict[int, Bucket]


@dataclass(frozen=True)
class Window:
    """Tokens of a document from `start` on: the last is only predicted, those from `scored` on are."""

    document: int
    tokens: torch.LongTensor
    start: int
    scored: int


@torch.no_grad()
def perplexity(
    model,
    documents: Iterable[Sequence[int]],
    stride: int | None = None,
    loop_counts: Sequence[int] | None = None,
    batch_size: int = 8,
    progress: bool = False,
) -> dict[int, Perplexity]:
    """
    The perplexity of documents at each of several loop counts, which share one forward pass ([`logits_by_loops`]).

    A document that is longer than the model's context, `C = config.max_position_embeddings`, is read in windows of `C`
    tokens that start `stride` tokens apart; after each but the first, `stride` tokens are predicted, so that each
    token is predicted once and, beyond the first window, from more than `C - stride` tokens.

    Args:
        model: a looped causal language model.
        documents: the token ids of each.
        stride: tokens between the starts of windows, from 1 to `C`; half of `C` by default. `C` is the fastest, and
            predicts the first tokens of a window from little.
        loop_counts: as for `model(num_loops=...)`; the one of the configuration by default.
        batch_size: windows in a forward pass.
        progress: whether to show a bar.

    Returns:
        For each loop count.

    Raises:
        `ValueError`: a value out of range; a model without loops; no document has two tokens; a token that the
            vocabulary does not have.
    """
    if model.config.model_type not in LOOPED:
        raise ValueError(
            f"model_type={model.config.model_type!r} is not allowed: it must be one of {', '.join(LOOPED)}."
        )
    context = model.config.max_position_embeddings
    stride = max(1, context // 2) if stride is None else stride
    loop_counts = [model.config.num_loops] if loop_counts is None else list(loop_counts)
    for field, value, most in (("stride", stride, context), ("batch_size", batch_size, math.inf)):
        if type(value) is not int or not 1 <= value <= most:
            allowed = "of at least 1" if most == math.inf else f"from 1 to the model's context of {most}"
            raise ValueError(f"{field}={value!r} is not allowed: it must be a whole number {allowed}.")
    if min(loop_counts) < 1 or len(set(loop_counts)) < len(loop_counts):
        raise ValueError(f"num_loops={loop_counts} is not allowed: it must be positive integers, each once.")
    lengths = []
    totals = {count: _Totals() for count in loop_counts}
    windows = _windows(_checked(documents, model.config.vocab_size, lengths), context, stride)
    model.eval()
    with tqdm(desc="Perplexity", unit="window", disable=not progress) as bar:
        for batch in _batches(windows, batch_size):
            losses = _losses(model, batch, loop_counts)
            for count, of_windows in zip(loop_counts, losses, strict=True):
                for window, of_tokens in zip(batch, of_windows, strict=True):
                    totals[count].add(window, of_tokens)
            bar.update(len(batch))
    if not any(length > 1 for length in lengths):
        raise ValueError(
            f"documents: {len(lengths)} were read, and none has two tokens, of which the second is predicted."
        )
    return {count: total.result(len(lengths)) for count, total in totals.items()}


def _checked(documents: Iterable[Sequence[int]], vocab_size: int, lengths: list[int]) -> Iterator[torch.LongTensor]:
    for number, document in enumerate(documents):
        tokens = torch.as_tensor(document, dtype=torch.long)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(
                f"documents: a token of document {number} is not in the model's vocabulary: it must be from 0 to "
                f"{vocab_size - 1}. Is the tokenizer the model's own?"
            )
        lengths.append(len(tokens))
        yield tokens


def _windows(documents: Iterable[torch.LongTensor], context: int, stride: int) -> Iterator[Window]:
    for number, tokens in enumerate(documents):
        scored = 1
        while scored < len(tokens):
            end = min(len(tokens), scored + (context if scored == 1 else stride))
            start = max(0, end - context - 1)
            yield Window(number, tokens[start:end], start, scored)
            scored = end


def _batches(windows: Iterator[Window], batch_size: int) -> Iterator[list[Window]]:
    while some := list(islice(windows, WINDOWS_PER_SORT * batch_size)):
        some.sort(key=lambda window: len(window.tokens), reverse=True)  # the largest batch first
        yield from (some[i : i + batch_size] for i in range(0, len(some), batch_size))


def _losses(model, batch: list[Window], loop_counts: list[int]) -> Iterator[list[torch.Tensor]]:
    """For each loop count the losses of each window's predicted tokens. Padding comes last, where no token sees it."""
    inputs = pad_sequence([window.tokens for window in batch], batch_first=True).to(model.device)
    for logits in logits_by_loops(model, inputs[:, :-1], loop_counts):
        losses = F.cross_entropy(logits.float().transpose(1, 2), inputs[:, 1:], reduction="none").double().cpu()
        yield [
            of_tokens[window.scored - window.start - 1 : len(window.tokens) - 1]
            for window, of_tokens in zip(batch, losses, strict=True)
        ]


class _Totals:
    """Sums of losses by document and by position."""

    def __init__(self):
        self.documents = {}
        self.positions = {}

    def add(self, window: Window, losses: torch.Tensor) -> None:
        self._add(self.documents, window.document, losses)
        position = window.scored
        while len(losses):
            start, end = _bucket(position)
            self._add(self.positions, start, losses[: end - position])
            losses, position = losses[end - position :], end

    @staticmethod
    def _add(sums: dict, key: int, losses: torch.Tensor) -> None:
        tokens, total = sums.get(key, (0, 0.0))
        sums[key] = tokens + len(losses), total + losses.sum().item()

    def result(self, num_documents: int) -> Perplexity:
        tokens, total = map(sum, zip(*self.documents.values(), strict=True))
        return Perplexity(
            tokens=tokens,
            loss=total / tokens,
            perplexity=perplexity_of(total / tokens),
            documents=[_mean(*self.documents.get(number, (0, 0.0))) for number in range(num_documents)],
            positions={start: _mean(*self.positions[start]) for start in sorted(self.positions)},
        )


def perplexity_of(loss: float) -> float:
    """`exp(loss)`; infinite where that is more than a float can hold."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _bucket(position: int) -> tuple[int, int]:
    """The first position of the bucket of a position, and that of the next."""
    if position < FIRST_BUCKET:
        return 1, FIRST_BUCKET
    start = FIRST_BUCKET << int(math.log2(position // FIRST_BUCKET))
    return start, 2 * start


def _mean(tokens: int, total: float) -> Bucket:
    return Bucket(tokens, total / tokens if tokens else math.nan)
