"""What the runs of a comparison say together: means and spreads over seeds, and differences by seed."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from .perplexity import perplexity_of


def summarise(models: Sequence[str], runs: Sequence[dict]) -> dict:
    """
    The results of a comparison, from those of its runs.

    Losses are cross-entropy in nats per token of the held-out documents, at the trained number of loops. Each model is
    compared with the first that has the same effective depth: their losses are subtracted seed by seed, as both read
    the same tokens in the same order there.

    Args:
        models: their names, the baseline first.
        runs: what [`do_run`] gave; a model without any is left out.

    Returns:
        `models`, a dictionary for each, and `table`, the main numbers as text.
    """
    summaries = {}
    for model in models:
        of_model = [run for run in runs if run["settings"]["model"] == model]
        if of_model:
            summaries[model] = _summary(sorted(of_model, key=_seed))
    for model, summary in summaries.items():
        depth = summary["effective_depth"]
        first = next(other for other, found in summaries.items() if found["effective_depth"] == depth)
        summary["compared_with"] = None if first == model else first
        summary["differences"] = [] if first == model else _differences(summary, summaries[first])
    return {"models": summaries, "table": format_table(summaries)}


def _seed(run: dict) -> int:
    return run["settings"]["training"]["seed"]


def _summary(runs: list[dict]) -> dict:
    first = runs[0]
    trained_loops = str(first["trained_loops"])
    at_trained = [run["perplexity"][trained_loops] for run in runs]
    training = [run["training"] for run in runs]
    return {
        **{name: first["training"][name] for name in ("parameters", "effective_depth", "tokens", "steps")},
        "learning_rate": first["settings"]["training"]["learning_rate"],
        "seeds": [_seed(run) for run in runs],
        "losses": [measured["loss"] for measured in at_trained],
        "trained_loops": first["trained_loops"],
        "held_out_tokens": at_trained[0]["tokens"],
        "seconds_per_step": [trained["seconds_per_step"] for trained in training],
        "budget": first["budget"],
        "train_losses": _mean_curve([trained["train_losses"] for trained in training]),
        "held_out_losses": _mean_curve([trained["held_out_losses"] for trained in training]),
        "loss_by_loops": _mean_by_key([_losses(run["perplexity"]) for run in runs]),
        "loss_by_position": _mean_by_key([_losses(measured["positions"]) for measured in at_trained]),
        "attention_share": _mean_share([run["attention_share"] for run in runs]),
        "alphas": _mean_by_key([run["alphas"] for run in runs]),
        "layer_rates": first["training"]["layer_rates"],
    }


def _losses(measured: dict[str, dict]) -> dict[str, float]:
    return {key: found["loss"] for key, found in measured.items()}


def _mean_by_key(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: mean([values[key] for values in found]) for key in found[0] if all(key in values for values in found)}


def _mean_curve(curves: list[list]) -> list[list]:
    """The mean of curves of pairs `[step, loss]` over the same steps."""
    return [[points[0][0], mean([loss for _, loss in points])] for points in zip(*curves, strict=True)]


def _mean_share(shares: list) -> list[list[float]] | None:
    """The mean over seeds and heads, by loop and decoder layer."""
    if shares[0] is None:
        return None
    by_visit = [[[mean(heads) for heads in loop] for loop in of_seed] for of_seed in shares]
    return [[mean(values) for values in zip(*layers, strict=True)] for layers in zip(*by_visit, strict=True)]


def _differences(summary: dict, other: dict) -> list[list]:
    """Pairs of seed and difference of losses, where both models have the seed."""
    losses = dict(zip(other["seeds"], other["losses"], strict=True))
    own = zip(summary["seeds"], summary["losses"], strict=True)
    return [[seed, loss - losses[seed]] for seed, loss in own if seed in losses]


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def stdev(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1))


def spread(values: Sequence[float], show: Callable[[float], str] = "{:.3f}".format) -> str:
    """Mean and standard deviation; of one value the value."""
    return f"{show(mean(values))} ± {show(stdev(values))}" if len(values) > 1 else show(mean(values))


def difference(summary: dict) -> str:
    """The mean difference with its standard error, or nothing where there is none."""
    values = [value for _, value in summary["differences"]]
    if len(values) < 2:
        return f"{values[0]:+.3f}" if values else ""
    return f"{mean(values):+.3f} ± {stdev(values) / math.sqrt(len(values)):.3f}"


def perplexities(summary: dict) -> list[float]:
    return [perplexity_of(loss) for loss in summary["losses"]]


COLUMNS = {
    "parameters": lambda summary: f"{summary['parameters']:,}",
    "depth": lambda summary: f"{summary['effective_depth']}",
    "rate": lambda summary: f"{summary['learning_rate']:g}",
    "seeds": lambda summary: f"{len(summary['seeds'])}",
    "loss": lambda summary: spread(summary["losses"]),
    "perplexity": lambda summary: spread(perplexities(summary), "{:.2f}".format),
    "difference": difference,
    "with": lambda summary: summary["compared_with"] or "",
}


def format_table(summaries: dict[str, dict]) -> str:
    """The main numbers of each model, as text."""
    rows = [["model", *COLUMNS]]
    rows += [[model, *(show(summary) for show in COLUMNS.values())] for model, summary in summaries.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
