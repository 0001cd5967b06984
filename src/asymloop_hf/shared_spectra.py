"""The heavy-tail estimates of many matrices, shared out among the processes of a distributed run."""

import math

import torch
from accelerate import PartialState
from accelerate.utils import reduce

from .heavy_tail import heavy_tail_alpha


def shared_alphas(weights: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """
    The estimate of each weight, the same on every process: each takes the spectra of its share, and the shares are
    summed up. Sharded weights (`DTensor`) are gathered one at a time; a process holds on to the one of its share until
    the others have theirs, so that all work at once.

    Args:
        weights: by name, in the same order on every process; matrices, or batches of matrices, of which the mean of
            the estimates is taken. `None`, where there is nothing to take the spectrum of, gives `nan`.

    Raises:
        `ValueError`: a weight has an entry that is not finite; it is named, on every process.
    """
    process = PartialState()
    largest_first = sorted(weights, key=lambda name: -_cost(weights[name]))  # neighbours in it take about as long
    alphas = {}
    for first in range(0, len(weights), process.num_processes):
        share = {}
        for turn, name in enumerate(largest_first[first : first + process.num_processes]):
            weight = _whole(weights[name])
            if turn == process.process_index:
                share[name] = weight
        alphas |= {name: _alpha(weight) for name, weight in share.items()}
    device = next((weight.device for weight in weights.values() if weight is not None), process.device)
    total = reduce(
        torch.tensor([alphas.get(name, 0.0) for name in weights], dtype=torch.float64, device=device), "sum"
    )
    summed = dict(zip(weights, total.tolist(), strict=True))
    if not_finite := [name for name, alpha in summed.items() if math.isinf(alpha)]:
        raise ValueError(f"{not_finite[0]} has entries that are not finite: there is no spectrum to take")
    return summed


def _cost(weight: torch.Tensor | None) -> float:
    """The operations of a spectrum, up to a factor."""
    return 0 if weight is None else weight.numel() * min(weight.shape[-2:])


def _whole(weight: torch.Tensor | None) -> torch.Tensor | None:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _alpha(weight: torch.Tensor | None) -> float:
    """The mean estimate of a weight's matrices that have one; infinite where an entry is not finite."""
    if weight is None:
        return math.nan
    if not weight.isfinite().all():
        return math.inf
    return heavy_tail_alpha(weight).nanmean().item()
