"""One run of a comparison: a model trained with one seed and measured, in a folder that says so when it is done."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback

from .attention_share import attention_share
from .budget import budget
from .comparison_data import load_data
from .heavy_tail import heavy_tail_alpha
from .layer_groups import layer_groups
from .model_variants import parse_variant
from .perplexity import perplexity
from .sizes import Size
from .training_run import Training, train
from .whole_writes import write_whole

RESULT = "result.json"


@dataclass(frozen=True)
class ComparisonRun:
    """
    One run.

    Args:
        model: its name, for [`parse_variant`].
        size: of the model.
        training: how it is trained.
        measured: whether it is only trained, to choose a learning rate, or measured and kept.
    """

    model: str
    size: Size
    training: Training
    measured: bool = True

    @property
    def folder(self) -> str:
        """Where it is, below the folder of the comparison."""
        stage = "runs" if self.measured else "tuning"
        return f"{stage}/{self.model}/rate-{self.training.learning_rate:g}-seed-{self.training.seed}"

    def settings(self) -> dict:
        return asdict(self)


def finished(run: ComparisonRun, output: Path) -> dict | None:
    """
    The result of a run that is done.

    Raises:
        `FileExistsError`: the folder has the result of a run with other settings.
    """
    path = output / run.folder / RESULT
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["settings"] != run.settings():
        raise FileExistsError(f"{str(path.parent)!r} holds a run with other settings: choose another output folder.")
    return result


def do_run(run: ComparisonRun, output: Path, callbacks: Sequence[TrainerCallback] = ()) -> dict:
    """
    Train a model on the blocks in `output/data`, measure it, and write both down in its folder: `result.json` last, so
    that a folder with one is whole. Without it, training goes on from the last checkpoint.
    """
    if (result := finished(run, output)) is not None:
        return result
    folder = output / run.folder
    checkpoints = folder / "checkpoints"
    variant = parse_variant(run.model)
    tokenizer, blocks, documents = load_data(output)
    model, trained = train(variant.config(run.size, tokenizer), run.training, blocks, checkpoints, callbacks)
    result = {"settings": run.settings(), "training": trained}
    if run.measured:
        result |= measure(model, documents)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RESULT, json.dumps(result))
    shutil.rmtree(checkpoints, ignore_errors=True)
    return finished(run, output)


def measure(model, documents: Sequence[Sequence[int]]) -> dict:
    """Perplexity by loops and positions, attention shares, alphas and budget of a trained model."""
    config = model.config
    counts = range(1, 2 * config.num_loops + 1) if config.num_loops > 1 else [1]
    by_loops = perplexity(model, documents, loop_counts=counts)
    shares = None
    if config.model_type == "asymloop":
        shares = attention_share(model, torch.tensor([token for document in documents for token in document])).tolist()
    return {
        "trained_loops": config.num_loops,
        "perplexity": {
            count: {
                "loss": found.loss,
                "perplexity": found.perplexity,
                "tokens": found.tokens,
                "positions": {start: asdict(bucket) for start, bucket in found.positions.items()},
            }
            for count, found in by_loops.items()
        },
        "attention_share": shares,
        "alphas": alphas(model),
        "budget": asdict(budget(config)),
    }


def alphas(model) -> dict[str, float]:
    """
    The [`heavy_tail_alpha`] of each weight matrix, of a batch of matrices their mean; `nan` where there is none, as in
    a model that has diverged.
    """
    weights = {
        group["name"]: group["params"][0] for group in layer_groups(model, 0.0, 1.0) if group["kind"] == "matrix"
    }
    return {
        name: heavy_tail_alpha(weight).mean().item() if weight.isfinite().all() else math.nan
        for name, weight in weights.items()
    }
