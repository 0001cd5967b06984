"""
The held-out loss of a Trainer in which every token has the same weight. Its own is a mean of the means of batches,
which depends on their size and, in several processes, on the sequences that fill up the last one.

    Trainer(..., compute_metrics=token_weighted_loss, preprocess_logits_for_metrics=token_losses)
"""

import torch
import torch.nn.functional as F
from transformers import EvalPrediction


def token_losses(logits: torch.Tensor | tuple, labels: torch.LongTensor) -> torch.Tensor:
    """
    What there is to add up of each sequence.

    Args:
        logits: `(batch, length, vocabulary)`, or a tuple that begins with them, as of models with routers.
        labels: `(batch, length)`, -100 where nothing is to be predicted; each is predicted from the position before.

    Returns:
        `(batch, 2)` in float64: the summed cross-entropy in nats, and the number of predicted tokens.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    predicted = labels[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), predicted, ignore_index=-100, reduction="none")
    return torch.stack([losses.double().sum(1), (predicted != -100).sum(1)], dim=1)


def token_weighted_loss(evaluation: EvalPrediction) -> dict[str, float]:
    """The `loss` in nats per token, which Trainer logs as `eval_loss` in place of its own."""
    loss, tokens = evaluation.predictions.sum(0)
    return {"loss": float(loss / tokens)}
