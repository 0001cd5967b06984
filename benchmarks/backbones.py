"""AsymLoop and its matched Full Loop on other backbones, where tokens go, and starting from a dense model.

    python benchmarks/backbones.py --output backbones.jsonl

On the installed documentation, at the size of the demo. For each backbone and model one seed chooses the learning
rate; the others compare. Both models have the same parameters and effective depth and see the same tokens in the same
order. Losses are cross-entropy on held-out text, without the load-balancing loss. `from_dense` trains a Llama, starts
an AsymLoop from it and compares that, after each number of steps, with the same AsymLoop trained from scratch.

A finished run is a line of the output file; the same command goes on where it stopped.
"""

import argparse
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import torch
from datasets.utils.logging import disable_progress_bar
from finished_runs import HELD_OUT_BLOCKS, FinishedRuns, installed_docs
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup, set_seed

from asymloop_hf import AsymLoopConfig, AsymLoopForCausalLM
from asymloop_hf.expert_use import expert_use

BLOCK, BATCH, VOCABULARY, LAYERS, HEADS = 256, 2, 4096, 2, 4
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
DENSE_RATE = 2e-3
EXPERT_USE_BLOCKS, EXPERT_USE_POINTS = 8, 5
BACKBONES = {
    "olmo2": {"backbone": "olmo2"},
    "moe": {"backbone": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True},
    "llama": {"backbone": "llama"},
    "olmo": {"backbone": "olmo"},
}
# How an AsymLoop starts: what `from_dense` is told, of a dense model with twice the layers of a stack.
STARTS = {
    "first half, last half": {},
    "all layers, silent decoder": {"encoder_from": range(2 * LAYERS), "silent_decoder": True},
}


def make_config(backbone: str, model: str, width: int, vocab_size: int):
    """AsymLoop, or the Full Loop that matches it; a token passes as many parameters with experts as without."""
    fields = BACKBONES[backbone]
    intermediate_size = math.ceil(width * 43 / 16 / fields.get("num_experts_per_tok", 1) / 8) * 8
    config = AsymLoopConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=intermediate_size,
        num_attention_heads=HEADS,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        max_position_embeddings=BLOCK,
        **fields,
    )
    return config if model == "asymloop" else config.matched_full_loop()


def batches(rows: dict[str, torch.Tensor], steps: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    order = torch.randperm(len(rows["input_ids"]), generator=torch.Generator().manual_seed(seed))
    for step in range(steps):
        chosen = order[(torch.arange(BATCH) + step * BATCH) % len(order)]
        yield {name: column[chosen] for name, column in rows.items()}


@torch.no_grad()
def held_out_loss(model, rows: dict[str, torch.Tensor]) -> float:
    """Cross-entropy per token."""
    router_logits = {"output_router_logits": False} if is_sparse(model) else {}
    losses = []
    for start in range(0, HELD_OUT_BLOCKS, 8):
        batch = {name: column[start : start + 8] for name, column in rows.items()}
        losses.append(model.eval()(**batch, use_cache=False, **router_logits).loss.item())
    model.train()
    return mean(losses)


def is_sparse(model) -> bool:
    return getattr(model.config, "num_experts", 0) > 0


def routing(model, rows: dict[str, torch.Tensor]) -> dict:
    """The extremes of the use of experts over visits and experts, and how many picks change from loop to loop."""
    uses = expert_use(model.eval(), rows["input_ids"][:EXPERT_USE_BLOCKS].flatten())
    model.train()
    return {
        stack: {
            "least": use.use.min().item(),
            "most": use.use.max().item(),
            "unused": int((use.use == 0).sum()),
            "changed": [use.change[loop, loop + 1].mean().item() for loop in range(len(use.use) - 1)],
        }
        for stack, use in uses.items()
    }


def never_picked(counts: torch.Tensor) -> int:
    """From the picks of each expert, of shape `(visits, num_experts)`."""
    return int((counts == 0).sum())


def train(model, blocks, steps: int, seed: int, rate: float) -> dict:
    """The held-out loss after training, and for a sparse model the use of experts on the way."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, steps // 10), steps)
    counts, use = 0, {}
    for step, batch in enumerate(batches(blocks["train"], steps, seed), start=1):
        outputs = model(**batch, use_cache=False)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if is_sparse(model):
            config = model.config
            picks = torch.stack(outputs.router_logits).detach().topk(config.num_experts_per_tok).indices
            counts = counts + torch.nn.functional.one_hot(picks, config.num_experts).sum((1, 2))
            if step % max(1, steps // EXPERT_USE_POINTS) == 0:
                use[step] = routing(model, blocks["held_out"])
    result = {"held_out_loss": held_out_loss(model, blocks["held_out"])}
    return result | ({"never_picked": never_picked(counts), "expert_use": use} if is_sparse(model) else {})


class Runs(FinishedRuns):
    def __init__(self, output: Path, steps: int, dense_steps: int, width: int):
        super().__init__(output)
        self.steps, self.dense_steps, self.width = steps, dense_steps, width
        self.dense_models = {}

    @cached_property
    def data(self) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
        packed, vocab_size = installed_docs(BLOCK, VOCABULARY)
        return {split: rows.with_format("torch")[:] for split, rows in packed.items()}, vocab_size

    @property
    def blocks(self) -> dict[str, dict[str, torch.Tensor]]:
        return self.data[0]

    @property
    def vocab_size(self) -> int:
        return self.data[1]

    def pair(self, backbone: str, model: str, rate: float, seed: int) -> dict:
        """One of a matched pair."""
        settings = {"part": "pairs", "backbone": backbone, "model": model, "rate": rate, "seed": seed}
        return self.once(settings | {"steps": self.steps, "width": self.width}, self.train_pair)

    def train_pair(self, settings: dict) -> dict:
        set_seed(settings["seed"])
        config = make_config(settings["backbone"], settings["model"], self.width, self.vocab_size)
        model = AutoModelForCausalLM.from_config(config)
        arguments = (settings[name] for name in ("steps", "seed", "rate"))
        return train(model, self.blocks, *arguments) | {"parameters": model.num_parameters()}

    def start(self, start: str, is_new: bool, steps: int, rate: float, seed: int) -> dict:
        """An AsymLoop started from a dense model; or, `is_new`, one of the same configuration from scratch."""
        settings = {"part": "from_dense", "start": start, "is_new": is_new, "steps": steps, "rate": rate, "seed": seed}
        return self.once(settings | {"dense_steps": self.dense_steps, "width": self.width}, self.train_start)

    def train_start(self, settings: dict) -> dict:
        seed, steps = settings["seed"], settings["steps"]
        dense, dense_loss = self.dense(seed)
        set_seed(seed)
        model = AsymLoopForCausalLM.from_dense(dense, num_decoder_layers=LAYERS, **STARTS[settings["start"]])
        if settings["is_new"]:
            model = AsymLoopForCausalLM(model.config)
        before = held_out_loss(model, self.blocks["held_out"])
        next_blocks = seed + 1000  # hardly any of those that the dense model has seen
        result = train(model, self.blocks, steps, next_blocks, settings["rate"])
        return result | {"dense_loss": dense_loss, "loss_before": before}

    def dense(self, seed: int) -> tuple:
        """A trained Llama and its held-out loss."""
        if seed not in self.dense_models:
            set_seed(seed)
            config = LlamaConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.width,
                intermediate_size=self.width * 43 // 16,
                num_attention_heads=HEADS,
                num_hidden_layers=2 * LAYERS,
                max_position_embeddings=BLOCK,
            )
            model = AutoModelForCausalLM.from_config(config)
            loss = train(model, self.blocks, self.dense_steps, seed, DENSE_RATE)["held_out_loss"]
            self.dense_models[seed] = model, loss
        return self.dense_models[seed]


def spread(losses: list[float]) -> str:
    return f"{mean(losses):.3f} ± {stdev(losses):.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"


def compare_pairs(runs: Runs, backbone: str, seeds: int) -> None:
    """Choose each model's rate with seed 0; print a row of losses of the other seeds, and the use of experts."""
    compared = {}
    for model in ("asymloop", "fullloop"):
        tried = [runs.pair(backbone, model, rate, 0) for rate in RATES]
        best = min(tried, key=lambda run: run["held_out_loss"])
        compared[model] = [runs.pair(backbone, model, best["rate"], seed) for seed in range(1, seeds + 1)]
        print(
            f"\n{backbone}, {model}, seed 0: " + ", ".join(f"{t['rate']:g}: {t['held_out_loss']:.3f}" for t in tried)
        )
    losses = {model: [run["held_out_loss"] for run in group] for model, group in compared.items()}
    less = [full - asym for asym, full in zip(losses["asymloop"], losses["fullloop"], strict=True)]
    print(f"\n| backbone | steps | AsymLoop | Full Loop | less, by seed |\n{'| --- ' * 5}|")
    by_seed = ", ".join(f"{difference:+.3f}" for difference in less)
    print(f"| {backbone} | {runs.steps} | {spread(losses['asymloop'])} | {spread(losses['fullloop'])} | {by_seed} |")
    for model, group in compared.items():
        for run in group:
            show_routing(model, run)


def show_routing(model: str, run: dict) -> None:
    if "expert_use" not in run:
        return
    print(f"\n{model}, seed {run['seed']}: {run['never_picked']} experts of all visits were never picked in training")
    for step, stacks in run["expert_use"].items():
        for stack, use in stacks.items():
            changed = ", ".join(f"{change:.1%}" for change in use["changed"]) or "-"
            print(
                f"  step {step:>6}, {stack:<8} share of picks {use['least']:.1%} to {use['most']:.1%}, "
                f"{use['unused']} unused, changed from loop to loop {changed}"
            )


def compare_starts(runs: Runs, steps: tuple[int, ...], seeds: int) -> None:
    """Choose each rate with seed 0 at the largest number of steps; print the losses of the other seeds."""
    print(f"\n| start | steps | dense, after {runs.dense_steps} | from dense | from scratch |\n{'| --- ' * 5}|")
    for start in STARTS:
        rates = {}
        for is_new in (False, True):
            tried = [runs.start(start, is_new, max(steps), rate, 0) for rate in RATES]
            rates[is_new] = min(tried, key=lambda run: run["held_out_loss"])["rate"]
        for count in steps:
            losses = {}
            for is_new in (False, True):
                group = [runs.start(start, is_new, count, rates[is_new], seed) for seed in range(1, seeds + 1)]
                losses[is_new] = [run["held_out_loss"] for run in group]
            dense = spread([run["dense_loss"] for run in group])
            print(f"| {start} | {count} | {dense} | {spread(losses[False])} | {spread(losses[True])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["pairs", "from_dense"], help="pairs, from_dense (default: both)")
    parser.add_argument("--output", type=Path, required=True, help="a jsonl file; finished runs in it are kept")
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, default=["olmo2", "moe"])
    parser.add_argument("--steps", type=int, default=1000, help="of each model of a pair")
    parser.add_argument("--dense-steps", type=int, default=1000, help="of the dense model to start from")
    parser.add_argument("--start-steps", type=int, nargs="+", default=[100, 300], help="after a start")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3, help="besides the one that chooses the rates")
    arguments = parser.parse_args()
    for name in ("steps", "dense_steps", "width", "seeds"):
        if getattr(arguments, name) < 1:
            parser.error(f"{name}={getattr(arguments, name)} is not allowed: it must be at least 1")
    if arguments.width % (2 * HEADS):
        parser.error(f"width={arguments.width} is not allowed: it must be a multiple of {2 * HEADS}")
    if unknown := set(arguments.parts) - {"pairs", "from_dense"}:
        parser.error(f"parts={', '.join(unknown)} is not allowed: it must be pairs or from_dense")
    disable_progress_bar()
    runs = Runs(arguments.output, arguments.steps, arguments.dense_steps, arguments.width)
    if "pairs" in arguments.parts:
        for backbone in arguments.backbones:
            compare_pairs(runs, backbone, arguments.seeds)
    if "from_dense" in arguments.parts:
        compare_starts(runs, tuple(arguments.start_steps), arguments.seeds)


if __name__ == "__main__":
    main()
