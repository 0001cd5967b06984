"""`asymloop spectra`: the layers' alphas and learning rates of a run, as a table and as figures."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .heavy_tail import spectrum, tail_exponent
from .layerwise_table import TABLE, Row, read_table

HEAT_MAPS = "layerwise_lr.png"
SPECTRA = "spectra.png"
PANELS_A_ROW = 7  # the matrices of a Llama layer


def find_table(folder: Path) -> Path:
    """
    The folder with `layerwise_lr.csv`: `folder` or its last checkpoint, whichever has the later update.

    Raises:
        `FileNotFoundError`: there is no such folder, or no table in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is not a folder; a run's output folder or a checkpoint is needed")
    places = [place for place in _places(folder) if (place / TABLE).is_file()]
    if places:
        return max(places, key=lambda place: max(row.step for row in read_table(place)))
    raise FileNotFoundError(
        f"{str(folder)!r} has no {TABLE}, and neither has its last checkpoint: HeavyTailLRCallback writes it with the "
        "first checkpoint after an update of the rates"
    )


def _places(folder: Path) -> list[Path]:
    checkpoint = get_last_checkpoint(folder)
    return [folder] if checkpoint is None else [folder, Path(checkpoint)]


def format_table(table: list[Row]) -> str:
    """The last update of every layer, as text."""
    last = max(row.step for row in table)
    lines = [f"{'layer':<60}{'alpha':>8}{'rate':>11}{'/ base':>8}"]
    for row in table:
        if row.step == last:
            lines.append(f"{row.layer:<60}{row.alpha:>8.3f}{row.rate:>11.3g}{ratio(row):>8.2f}")
    steps = sorted({row.step for row in table})
    updates = "1 update" if len(steps) == 1 else f"{len(steps)} updates"
    lines.append(f"\n{updates}, the last at step {last}, where the base rate was {table[-1].base_rate:.3g}")
    return "\n".join(lines)


def ratio(row: Row) -> float:
    """The layer's rate over the base rate; `nan` where the schedule starts or ends at zero."""
    return row.rate / row.base_rate if row.base_rate else float("nan")


def draw_heat_maps(table: list[Row]):
    """A figure of alpha, and of the rate over the base rate, of each layer (down) at each update (across)."""
    from matplotlib.figure import Figure

    layers, steps = list(dict.fromkeys(row.layer for row in table)), sorted({row.step for row in table})
    figure = Figure(figsize=(min(12 + 0.3 * len(steps), 30), 1.5 + 0.2 * len(layers)), layout="constrained")
    maps = {"alpha": lambda row: row.alpha, "rate / base rate": ratio}
    for axes, (title, value) in zip(figure.subplots(1, 2, sharey=True), maps.items(), strict=True):
        values = np.full((len(layers), len(steps)), np.nan)
        for row in table:
            values[layers.index(row.layer), steps.index(row.step)] = value(row)
        image = axes.imshow(values, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axes)
        shown = range(0, len(steps), 1 + len(steps) // 10)
        axes.set(title=title, xlabel="step", xticks=shown, xticklabels=[steps[i] for i in shown])
        axes.set_yticks(range(len(layers)), [_short(layer) for layer in layers], fontsize=7)
    return figure


def _short(layer: str) -> str:
    return layer.removeprefix("model.").removesuffix(".weight")


def find_weights(folder: Path) -> list[Path]:
    """
    The safetensors files of `folder`, or of its last checkpoint; none, where neither has any.

    Raises:
        `ValueError`: the index of the files cannot be read.
    """
    for place in _places(folder):
        if (place / SAFE_WEIGHTS_NAME).is_file():
            return [place / SAFE_WEIGHTS_NAME]
        if (index := place / SAFE_WEIGHTS_INDEX_NAME).is_file():
            try:
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (ValueError, KeyError) as error:
                raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
            return [place / file for file in sorted(set(files))]
    return []


def layer_spectra(files: list[Path], layers: list[str]) -> dict[str, torch.Tensor]:
    """
    The eigenvalues of the layers that these files have.

    Raises:
        `ValueError`: a weight has an entry that is not finite, or a file cannot be read; it is named.
    """
    spectra = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                tensors = {layer: weights.get_tensor(layer) for layer in set(layers).intersection(weights.keys())}
        except SafetensorError as error:
            raise ValueError(f"{file} is not a safetensors file that can be read: {error}") from error
        for layer, weight in tensors.items():
            if not weight.isfinite().all():
                raise ValueError(f"{layer} in {file} has entries that are not finite: it has no spectrum")
            spectra[layer] = spectrum(weight)
    return {layer: spectra[layer] for layer in layers if layer in spectra}


def plot_spectra(spectra: dict[str, torch.Tensor], path: Path) -> None:
    """Draw the density of each layer's eigenvalues, and the power law that is fitted to those above the median."""
    from matplotlib.figure import Figure

    rows = -(-len(spectra) // PANELS_A_ROW)
    figure = Figure(figsize=(2.6 * PANELS_A_ROW, 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, PANELS_A_ROW, squeeze=False).flat
    for axes, (name, eigenvalues) in zip(panels, spectra.items(), strict=False):
        plot_spectrum(axes, name, eigenvalues)
    for axes in list(figure.axes)[len(spectra) :]:
        axes.set_axis_off()
    figure.savefig(path, format="png", dpi=100)


def plot_spectrum(axes, name: str, eigenvalues: torch.Tensor) -> None:
    """One panel: `eigenvalues` is `(N,)`, or `(experts, N)`, which are drawn together."""
    alpha = tail_exponent(eigenvalues).nanmean().item()
    smallest = eigenvalues[..., eigenvalues.shape[-1] // 2 - 1].mean().item()  # of the tail
    positive = eigenvalues[eigenvalues > 0].numpy()
    if len(positive):
        share = len(positive) / eigenvalues.numel()
        density, edges = np.histogram(positive, np.geomspace(positive.min(), positive.max() * 1.001, 30), density=True)
        axes.stairs(share * density, edges, fill=True, alpha=0.4)
        if smallest > 0:
            tail = np.geomspace(smallest, positive.max(), 50)
            axes.plot(tail, 0.5 * (alpha - 1) / smallest * (tail / smallest) ** -alpha, color="C1")
        axes.loglog()
    axes.set_title(f"{_short(name)}\nalpha {alpha:.2f}", fontsize=7)
    axes.tick_params(labelsize=6)


def run_command(args: argparse.Namespace) -> None:
    """Run `asymloop spectra` with parsed arguments."""
    folder = Path(args.folder)
    place = find_table(folder)
    table = read_table(place)
    output = Path(args.output or folder)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output={str(output)!r} is not allowed: it must be a folder")
    output.mkdir(parents=True, exist_ok=True)
    print(format_table(table))
    draw_heat_maps(table).savefig(output / HEAT_MAPS, format="png", dpi=120)
    print(f"alphas and rates are drawn in {output / HEAT_MAPS}")

    layers = list(dict.fromkeys(row.layer for row in table))
    files = find_weights(place) or find_weights(folder)
    found = layer_spectra(files, layers)
    if found:
        plot_spectra(found, output / SPECTRA)
        print(f"the spectra of the weights in {files[0].parent} are drawn in {output / SPECTRA}")
    else:
        print(f"{folder} has no safetensors file with these layers: their spectra are not drawn")


def add_command(subparsers: argparse._SubParsersAction) -> None:
    """Add `asymloop spectra` to the command line."""
    parser = subparsers.add_parser("spectra", help="the layers' alphas, learning rates and spectra of a run")
    parser.add_argument("folder", metavar="RUN_OR_CHECKPOINT", help="a run's output folder, or one of its checkpoints")
    parser.add_argument("--output", help="folder for the figures (default: RUN_OR_CHECKPOINT)")
    parser.set_defaults(run=run_command)
