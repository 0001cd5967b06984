"""What heavy-tail-guided rates cost: steps with and without them in turns, one matrix of each width, float64.

    python benchmarks/layerwise_lr_cost.py          # a few minutes on two cores

The model has 30 million parameters. A pair is a step of Trainer's AdamW and a step of the layerwise optimizer on a
copy of the model, each with forward and backward pass, and an update of the rates, of which each step has a hundredth.
"""

import argparse
import copy
import tempfile
import time
from statistics import median
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from asymloop_hf import AsymLoopConfig
from asymloop_hf.budget import budget
from asymloop_hf.heavy_tail import heavy_tail_alpha, tail_exponent
from asymloop_hf.layerwise_lr import HeavyTailLRCallback

EVERY = 100
BATCH, BLOCK = 4, 256
SIZES = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
STACKS = {"num_encoder_layers": 4, "num_decoder_layers": 4, "num_loops": 3}


def timed(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def train_step(model, optimizer, input_ids, before=lambda: None) -> None:
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before()
    optimizer.step()
    optimizer.zero_grad()


def show_cost(config, pairs: int) -> float:
    """Print the ratios of the pairs; the seconds of a step without layerwise rates."""
    set_seed(0)
    models = [AutoModelForCausalLM.from_config(config).train()]
    models.append(copy.deepcopy(models[0]))
    args = TrainingArguments(tempfile.mkdtemp(), weight_decay=0.1, report_to="none", use_cpu=True)
    plain = Trainer(model=models[0], args=args).create_optimizer()
    llr = HeavyTailLRCallback(every=EVERY, until=1.0)
    given = llr.optimizer(args)
    layerwise = Trainer(model=models[1], args=args, optimizer_cls_and_kwargs=given, callbacks=[llr]).create_optimizer()
    state = SimpleNamespace(global_step=1, max_steps=10 * EVERY, epoch=0.0, log_history=[])
    llr.on_train_begin(args, state, None, optimizer=layerwise)

    def event(step):
        state.global_step = step
        llr.on_pre_optimizer_step(args, state, None, optimizer=layerwise)

    print(f"{models[0].num_parameters() / 1e6:.1f} million parameters, {BATCH} x {BLOCK} tokens a step", flush=True)
    without, update, ratios = [], [], []
    for pair in range(pairs + 1):
        input_ids = torch.randint(0, config.vocab_size, (BATCH, BLOCK))
        seconds = timed(train_step, models[0], plain, input_ids)
        layerwise_seconds = timed(train_step, models[1], layerwise, input_ids, lambda: event(EVERY + 1))
        update_seconds = timed(event, EVERY)
        if pair:  # the first pays for what is made once
            without.append(seconds)
            update.append(update_seconds)
            ratios.append((layerwise_seconds + update_seconds / EVERY) / seconds)
    print(f"a step without: {median(without):.3f} s; an update of the rates: {median(update):.3f} s")
    print(f"with / without: median {median(ratios):.4f} of {pairs} pairs, from {min(ratios):.4f} to {max(ratios):.4f}")
    print(
        f"the share of the updates alone: {100 * median(update) / EVERY / median(without):.2f} %, while there are any"
    )
    return median(without)


def show_widths(measured_config, step_seconds: float, repeats: int) -> None:
    """One matrix of each width, and from it the update of each preset; a step is scaled by the FLOPs of the model."""
    print("\npreset   one square    one MLP matrix   an update   share of 100 steps with as many tokens")
    for name in ("60m", "350m", "1b"):
        config = AsymLoopConfig.preset(name)
        shapes = [(config.hidden_size, config.hidden_size), (config.hidden_size, config.intermediate_size)]
        square, wide = (
            median(timed(heavy_tail_alpha, torch.randn(shape)) for _ in range(repeats)) for shape in shapes
        )
        update = (config.num_encoder_layers + config.num_decoder_layers) * (4 * square + 3 * wide)
        scale = budget(config, BLOCK).flops_per_token / budget(measured_config, BLOCK).flops_per_token
        share = update / (EVERY * step_seconds * scale)
        print(f"{name:<8}{square:>9.3f} s{wide:>15.3f} s{update:>10.1f} s{100 * share:>12.2f} %", flush=True)


def show_precision(rows: int, columns: int, repeats: int) -> None:
    """Alpha from float32 and from float64, for singular values that fall off to a share of the largest one."""
    print(f"\nsmallest / largest singular value of {rows} x {columns}   alpha   error in float32   in float64")
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64))[0]
    for digits in (2, 4, 6, 8):
        weight = (left * torch.logspace(0, -digits, rows, dtype=torch.float64)) @ right.T
        exact = tail_exponent(torch.linalg.svdvals(weight).square().flip(0)).item()
        errors = [
            tail_exponent(gram_spectrum(weight, dtype)).item() - exact for dtype in (torch.float32, torch.float64)
        ]
        print(f"1e-{digits:<53}{exact:.4f}{errors[0]:>19.1e}{errors[1]:>13.1e}")
    dtypes = (torch.float32, torch.float64)
    seconds = [median(timed(gram_spectrum, weight, dtype) for _ in range(repeats)) for dtype in dtypes]
    print(f"seconds: float32 {seconds[0]:.3f}, float64 {seconds[1]:.3f}")


def gram_spectrum(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight = weight.to(dtype)
    return torch.linalg.eigvalsh(weight @ weight.T).clamp(min=0).to(torch.float64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3, help="of the spectrum of one matrix")
    arguments = parser.parse_args()
    measured = AsymLoopConfig(**SIZES, **STACKS, max_position_embeddings=BLOCK)
    show_widths(measured, show_cost(measured, arguments.pairs), arguments.repeats)
    show_precision(512, 1376, arguments.repeats)
