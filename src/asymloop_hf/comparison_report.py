"""The page that shows a comparison: tables and plots in one html file without anything beside it."""

import base64
import io
import math
import re
from collections.abc import Iterable
from html import escape

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .comparison_results import COLUMNS, perplexities
from .layerwise_table import Row
from .perplexity import perplexity_of
from .spectra import draw_heat_maps

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { white-space: normal; vertical-align: bottom }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace }
img { max-width: 100%; height: auto } p.note { color: #555; max-width: 46rem }
"""
BUDGET = {
    "parameters": "parameters",
    "embedding_parameters": "of these embeddings and head",
    "active_parameters": "active in a token",
    "effective_depth": "effective depth",
    "flops_per_token": "forward FLOPs per token",
    "kv_bytes_per_token": "KV bytes per token",
}
WEIGHT = re.compile(r"model\.(?:(encoder|decoder)\.)?layers\.(\d+)\.(?:\w+\.)+?(\w+?)(?:\.weight)?")


def report_page(results: dict) -> str:
    """
    The page, as html.

    Args:
        results: settings and what [`summarise`] says, as `results.json` has them.
    """
    models = results["models"]
    colors = {model: colormaps["tab10" if len(models) <= 10 else "tab20"](i % 20) for i, model in enumerate(models)}
    rates = {model: summary for model, summary in models.items() if summary["layer_rates"]}
    sections = [
        ("Held-out loss", _main_table(models), _losses_note(results)),
        ("Final perplexity", _image(_final(models, colors)), "A point is a seed, the bar their mean."),
        (
            "Loss curves",
            _image(_curves(models, colors)),
            "Means over seeds. Left: training loss, smoothed by the logging interval. Right: held-out blocks.",
        ),
        (
            "Loops at test time",
            _image(_by_loops(models, colors)),
            "Held-out perplexity of the trained models at other numbers of loops; the circle is the trained one.",
        ),
        (
            "Position in the document",
            _image(_by_position(models, colors)),
            "Held-out loss less that of the first model, by the token's position in its document.",
        ),
        (
            "Attention to the global KV",
            _image(_shares(models, colors)),
            "The share of a decoder layer's attention that goes to the encoder's key/values, by loop: mean over "
            "heads, tokens and seeds. The rest goes to the layer's own local key/values.",
        ),
        (
            "Spectra",
            _image(_alphas(models)),
            "Heavy-tail exponent alpha of each weight matrix after training, mean over seeds: the smaller, the "
            "heavier the tail.",
        ),
        *(
            (
                f"Layerwise rates: {model}",
                _image(_rates(summary)),
                "Of each layer at each update, with the first seed.",
            )
            for model, summary in rates.items()
        ),
        ("Learning rates that were tried", _tuning_table(results["tuning"]), _tuning_note(results)),
        ("Budget", _budget_table(models), "Of a forward pass at the training context; the cache in bfloat16."),
    ]
    body = "\n".join(
        f"<section><h2>{escape(title)}</h2>\n{content}\n<p class=note>{escape(note)}</p></section>"
        for title, content, note in sections
        if content
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>AsymLoop comparison</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>\n'
        f"<h1>Comparison at the size {escape(results['size'])}</h1>\n<p>{escape(_settings(results))}</p>\n"
        f"{body}\n</html>\n"
    )


def _settings(results: dict) -> str:
    first = next(iter(results["models"].values()))
    return (
        f"Corpus {results['corpus']}; {first['tokens']:,} tokens for each model, in {first['steps']:,} steps of "
        f"{results['batch_size']} sequences, the same tokens in the same order for all models of a seed; AdamW with "
        f"warm-up and a cosine schedule."
    )


def _losses_note(results: dict) -> str:
    first = next(iter(results["models"].values()))
    return (
        f"Cross-entropy in nats per token on {first['held_out_tokens']:,} held-out tokens: mean and standard "
        "deviation over seeds. Differences are taken seed by seed with the first model of the same effective depth, "
        "and given with their standard error; below zero is better."
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    def line(cells, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _main_table(models: dict) -> str:
    columns = COLUMNS | {"by seed": lambda summary: ", ".join(f"{value:+.3f}" for _, value in summary["differences"])}
    rows = [[model, *(show(summary) for show in columns.values())] for model, summary in models.items()]
    return _table(["model", *columns], rows)


def _budget_table(models: dict) -> str:
    rows = [[model, *(f"{summary['budget'][field]:,.0f}" for field in BUDGET)] for model, summary in models.items()]
    return _table(["model", *BUDGET.values()], rows)


def _tuning_table(tuning: dict) -> str:
    if not tuning:
        return ""
    rates = sorted({rate for losses in tuning.values() for rate, _ in losses})
    rows = []
    for model, losses in tuning.items():
        found = dict(map(tuple, losses))
        rows.append([model, *(f"{found[rate]:.3f}" if rate in found else "" for rate in rates)])
    return _table(["held-out loss", *(f"{rate:g}" for rate in rates)], rows)


def _tuning_note(results: dict) -> str:
    whose = {
        "baseline": "The first model's best rate is that of all.",
        "kind": "The first model of each kind, with and without layerwise rates, chose the rate of its kind.",
    }
    return f"After {results['tuning_tokens']:,} tokens, with a seed that is not compared. {whose[results['tune']]}"


def _image(figure: Figure | None) -> str:
    if figure is None:
        return ""
    picture = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "asymloop"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(picture.getvalue()).decode()}">'


def _final(models: dict, colors: dict) -> Figure:
    figure = Figure(figsize=(10, 1 + 0.4 * len(models)), layout="constrained")
    axes = figure.add_subplot(xlabel="held-out perplexity")
    for row, (model, summary) in enumerate(models.items()):
        values = perplexities(summary)
        axes.plot([np.mean(values)] * 2, [row - 0.3, row + 0.3], color=colors[model], linewidth=3)
        axes.plot(values, [row] * len(values), "o", color=colors[model], markeredgecolor="white")
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    return figure


def _finite(values: Iterable[float]) -> list[float]:
    """Without those of runs that have diverged, for the limits of axes."""
    return [value for value in values if math.isfinite(value)]


def _legend(figure: Figure, axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")


def _curves(models: dict, colors: dict) -> Figure:
    figure = Figure(figsize=(11, 5 + 0.1 * len(models)), layout="constrained")
    training, held_out = figure.subplots(1, 2, sharey=True)
    for model, summary in models.items():
        training.plot(*zip(*summary["train_losses"], strict=True), color=colors[model], label=model, linewidth=1)
        held_out.plot(*zip(*summary["held_out_losses"], strict=True), ".-", color=colors[model])
    training.set(xlabel="step", ylabel="cross-entropy (nats per token)", title="training")
    if lowest := _finite(loss for summary in models.values() for _, loss in summary["held_out_losses"]):
        highest = _finite(summary["held_out_losses"][0][1] for summary in models.values())
        training.set_ylim(min(lowest) - 0.2, max(highest, default=max(lowest)) + 0.5)
    held_out.set(xlabel="step", title="held out")
    for axes in (training, held_out):
        axes.grid(alpha=0.3)
    _legend(figure, training)
    return figure


def _by_loops(models: dict, colors: dict) -> Figure:
    figure = Figure(figsize=(11, 5 + 0.1 * len(models)), layout="constrained")
    axes = figure.add_subplot(xlabel="loops", ylabel="held-out perplexity", yscale="log")
    for model, summary in models.items():
        points = {int(count): perplexity_of(loss) for count, loss in summary["loss_by_loops"].items()}
        axes.plot(points.keys(), points.values(), ".-", color=colors[model], label=model)
        trained = summary["trained_loops"]
        axes.plot(trained, points[trained], "o", markersize=11, markerfacecolor="none", color=colors[model])
    trained = (summary["loss_by_loops"][str(summary["trained_loops"])] for summary in models.values())
    if trained := _finite(map(perplexity_of, trained)):
        axes.set_ylim(top=3 * max(trained))  # far from the trained number, some models know nothing
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3, which="both")
    _legend(figure, axes)
    return figure


def _by_position(models: dict, colors: dict) -> Figure:
    figure = Figure(figsize=(11, 4.5 + 0.1 * len(models)), layout="constrained")
    axes = figure.add_subplot(xlabel="position in the document", ylabel="loss less that of the first model (nats)")
    reference = next(iter(models.values()))["loss_by_position"]
    starts = sorted(map(int, reference))
    for model, summary in models.items():
        differences = [summary["loss_by_position"][str(start)] - reference[str(start)] for start in starts]
        axes.plot(range(len(starts)), differences, ".-", color=colors[model], label=model)
    ends = [f"{start} to {end - 1}" for start, end in zip(starts, starts[1:], strict=False)]
    axes.set_xticks(range(len(starts)), [*ends, f"from {starts[-1]}"])
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return figure


def _shares(models: dict, colors: dict) -> Figure | None:
    shares = {model: np.array(s["attention_share"]) for model, s in models.items() if s["attention_share"] is not None}
    if not shares:
        return None
    num_layers = max(share.shape[1] for share in shares.values())
    figure = Figure(figsize=(11, 4.5 + 0.1 * len(shares)), layout="constrained")
    panels = figure.subplots(1, num_layers, sharey=True, squeeze=False)[0]
    for model, share in shares.items():
        for layer in range(share.shape[1]):
            loops = range(1, share.shape[0] + 1)
            panels[layer].plot(loops, share[:, layer], ".-", color=colors[model], label=model)
    for layer, axes in enumerate(panels):
        axes.set(title=f"decoder layer {layer}", xlabel="loop", ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of attention to the global KV")
    _legend(figure, panels[0])
    return figure


def _alphas(models: dict) -> Figure:
    """A map for each model: layers down, matrices across."""
    places = {model: {_place(name): alpha for name, alpha in s["alphas"].items()} for model, s in models.items()}
    alphas = _finite(alpha for found in places.values() for alpha in found.values()) or [0.0]
    matrices = list(dict.fromkeys(matrix for found in places.values() for _, matrix in found))
    layers = {model: list(dict.fromkeys(layer for layer, _ in found)) for model, found in places.items()}
    num_rows = math.ceil(len(models) / 3)
    figure = Figure(figsize=(11, num_rows * (1.2 + 0.28 * max(map(len, layers.values())))), layout="constrained")
    panels = figure.subplots(num_rows, 3, squeeze=False).flatten()
    for axes, (model, found) in zip(panels, places.items(), strict=False):
        values = [[found.get((layer, matrix), math.nan) for matrix in matrices] for layer in layers[model]]
        image = axes.imshow(values, vmin=min(alphas), vmax=max(alphas), aspect="auto")
        axes.set_title(model, fontsize="small")
        axes.set_yticks(range(len(layers[model])), layers[model], fontsize=7)
        axes.set_xticks(range(len(matrices)), [name.removesuffix("_proj") for name in matrices], fontsize=7)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=panels, label="alpha", shrink=0.6)
    return figure


def _place(name: str) -> tuple[str, str]:
    """Layer and matrix of a weight: `encoder 0` and `q_proj` of `model.encoder.layers.0.self_attn.q_proj.weight`."""
    stack, number, matrix = WEIGHT.fullmatch(name).groups()
    return f"{stack or 'layer'} {number}", matrix


def _rates(summary: dict) -> Figure:
    return draw_heat_maps([Row(*row) for row in summary["layer_rates"]])
