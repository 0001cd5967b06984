"""What heavy-tail-guided rates do to the held-out loss: a Llama and an AsymLoop on the installed documentation.

    python benchmarks/layerwise_lr_effect.py --output effect.jsonl

One seed chooses: the base rate of the uniform rate first, then base rate and largest ratio of the layerwise rates, and
those of a control in which only embeddings and head have the largest rate. The chosen settings are compared with other
seeds; so is the reverse of the layerwise rates. A finished run is a line of the output file; the same command goes on
where it stopped.
"""

import argparse
import itertools
import tempfile
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

from datasets.utils.logging import disable_progress_bar
from finished_runs import FinishedRuns, installed_docs
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from asymloop_hf import AsymLoopConfig, FullLoopConfig
from asymloop_hf.layerwise_lr import HeavyTailLRCallback

BLOCK, BATCH, VOCABULARY = 256, 2, 4096
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)  # of the uniform rate
SHARES = (0.25, 0.5, 1.0)  # of the best of them, as base rate of the layerwise rates
SETTINGS = {
    "layerwise": {},
    "embeddings only": {"until": 0.0},
    "reverse": {"reverse": True},
}


def make_config(model: str, width: int, vocab_size: int):
    """A Llama of four layers (a Full Loop with one loop is one), or an AsymLoop with the same parameters."""
    sizes = {"hidden_size": width, "intermediate_size": width * 43 // 16, "num_attention_heads": 4}
    sizes |= {"vocab_size": vocab_size, "max_position_embeddings": BLOCK}
    if model == "llama":
        return FullLoopConfig(num_layers=4, num_loops=1, input_injection="none", **sizes)
    return AsymLoopConfig(num_encoder_layers=2, num_decoder_layers=2, num_loops=3, **sizes)


def train(config, blocks, steps: int, seed: int, rate: float, kind: str, max_ratio: float) -> float:
    """The held-out loss after training."""
    set_seed(seed)
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=8,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        data_seed=seed,
        use_cpu=True,
    )
    layerwise = {}
    if kind != "uniform":
        every = max(1, steps // 25)  # five updates in the first fifth
        llr = HeavyTailLRCallback(max_ratio=max_ratio, every=every, ramp=every // 2, **SETTINGS[kind])
        layerwise = {"optimizer_cls_and_kwargs": llr.optimizer(args), "callbacks": [llr]}
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=args,
        data_collator=default_data_collator,
        train_dataset=blocks["train"],
        eval_dataset=blocks["held_out"],
        **layerwise,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_loss"]


class Runs(FinishedRuns):
    def __init__(self, output: Path, steps: int, width: int):
        super().__init__(output)
        self.shape = {"steps": steps, "width": width}

    def loss(self, **settings) -> float:
        return self.once(self.shape | settings, self.train)["held_out_loss"]

    def train(self, settings: dict) -> dict:
        blocks, vocab_size = self.data
        config = make_config(settings["model"], settings["width"], vocab_size)
        training = {key: value for key, value in settings.items() if key not in ("model", "width")}
        return {"held_out_loss": train(config, blocks, **training)}

    @cached_property
    def data(self) -> tuple[dict, int]:
        return installed_docs(BLOCK, VOCABULARY)


def compare(runs: Runs, model: str, seeds: int, ratios: list[float]) -> None:
    """Choose with seed 0, then print mean and spread over the other seeds as the rows of a table."""
    uniform = [{"model": model, "kind": "uniform", "rate": rate, "max_ratio": 1.0} for rate in RATES]
    best = min(uniform, key=lambda settings: runs.loss(**settings, seed=0))
    tried, chosen = [uniform], {}
    for kind in ("layerwise", "embeddings only"):
        grid = itertools.product(SHARES, ratios)
        tried.append([{"model": model, "kind": kind, "rate": best["rate"] * s, "max_ratio": r} for s, r in grid])
        chosen[kind] = min(tried[-1], key=lambda settings: runs.loss(**settings, seed=0))
    compared = [best, *chosen.values(), chosen["layerwise"] | {"kind": "reverse"}]
    losses = [[runs.loss(**settings, seed=seed) for seed in range(1, seeds + 1)] for settings in compared]
    print(f"\n| {model} | base rate | largest ratio | held-out loss, {seeds} seeds | less than uniform, by seed |")
    print("| --- | --- | --- | --- | --- |")
    for settings, row in zip(compared, losses, strict=True):
        less = ", ".join(f"{reference - loss:+.3f}" for reference, loss in zip(losses[0], row, strict=True))
        numbers = f"{settings['rate']:g} | {settings['max_ratio']:g} | {mean(row):.3f} ± {stdev(row):.3f}"
        print(f"| {settings['kind']} | {numbers} | {less} |")
    for grid in tried:
        losses = (f"{s['rate']:g} x {s['max_ratio']:g}: {runs.loss(**s, seed=0):.3f}" for s in grid)
        print(f"\ntried with seed 0, {grid[0]['kind']}: {', '.join(losses)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file of the finished runs")
    parser.add_argument("--models", nargs="+", choices=("llama", "asymloop"), default=["llama", "asymloop"])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3, help="besides the one that chooses")
    parser.add_argument("--ratios", type=float, nargs="+", default=[2.0, 5.0], help="largest ratios to try")
    arguments = parser.parse_args()
    disable_progress_bar()
    all_runs = Runs(arguments.output, arguments.steps, arguments.width)
    for name in arguments.models:
        compare(all_runs, name, arguments.seeds, arguments.ratios)
