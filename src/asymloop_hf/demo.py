"""`asymloop demo`: the whole path in a few minutes, from raw text to the scores of AsymLoop and its matched Full Loop.

Both models have the same parameters and effective depth, and see the same tokens in the same order with the same seed,
schedule and layerwise learning rates.
"""

import argparse
import logging
import math
import tempfile
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from .continuations import NUM_CHOICES, make_continuations, score_continuations
from .corpus import load_corpus
from .layerwise_table import write_table
from .model_variants import parse_variant
from .packing import pack
from .sizes import SIZES
from .staged_run import StagedRun
from .tokenizer import train_tokenizer
from .training_run import HELD_OUT_POINTS, LossBar, Training, train

DEMO_SIZES = ("tiny", "small", "medium")
MODELS = {"asymloop": "asymloop", "fullloop": "full_loop"}  # folders, and the names of the models in them
TITLES = {"asymloop": "AsymLoop", "fullloop": "Full Loop"}
TRAIN_DOCUMENTS = 8000  # far more text than a few minutes on two cores can read
HELD_OUT_BLOCKS = 64
QUESTIONS = 200
QUESTION_TOKENS = 150  # of one choice with its context, roughly
PROMPTS = 3
TIMED_STEPS = 6


def run_demo(output="demo-run", size="small", minutes=6.0, steps=None, seed=0, corpus="installed-docs") -> dict:
    """Train, save, reload, generate with and score both models; return what `results.json` in `output` says.

    Args:
        output: a new or an empty folder; both checkpoints, `results.json` and `loss.png` end up there.
        size: one of `DEMO_SIZES`.
        minutes: the time that everything together may take; it decides the number of steps.
        steps: training steps of each model, whatever the time.
        seed: of the initialisation, the order of the data, the questions and the sampled continuations.
        corpus: what `load_corpus` takes.

    Raises:
        `ValueError`: a setting out of range, or too little time or text.
        `FileExistsError`: `output` holds something already.
    """
    deadline = time.monotonic() + 60 * minutes
    check_settings(size, minutes, steps, seed)
    settings = {"size": size, "minutes": minutes, "steps": steps, "seed": seed, "corpus": corpus}
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    run = StagedRun(output, {"settings": settings, "versions": versions, "models": {}})
    try:
        return run_stages(run, SIZES[size], deadline, steps, seed, corpus)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(run.kept()) from None
    except ValueError:
        if not run.results["models"]:  # nothing worth keeping, and the same command must work again
            run.discard()
        raise


def check_settings(size, minutes, steps, seed):
    """Raise a ValueError that names the first setting that is out of range."""
    if size not in DEMO_SIZES:
        raise ValueError(f"size={size!r}: it must be one of {', '.join(DEMO_SIZES)}")
    if not isinstance(minutes, (int, float)) or not (minutes > 0 and math.isfinite(minutes)):
        raise ValueError(f"minutes={minutes!r}: it must be a number above 0")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps={steps!r}: it must be a whole number of at least 1")
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: it must be a whole number from 0 to 2**32 - 1")


def run_stages(run, size, deadline, steps, seed, corpus) -> dict:
    """The stages of the demo, one after the other."""
    with run.stage("text") as results:
        texts = {split: documents.shuffle(seed=seed) for split, documents in load_corpus(corpus).items()}
        texts["train"] = first(texts["train"], TRAIN_DOCUMENTS)
        questions = make_continuations(texts["held_out"]["text"], QUESTIONS, seed=seed)
        results["documents"] = {split: len(documents) for split, documents in texts.items()}
        print(f"{len(texts['train']):,} documents to train on, {len(texts['held_out']):,} held out")

    if steps is None and time.monotonic() > deadline:
        raise ValueError("minutes: collecting the text took all of them; allow more minutes, or set steps")

    with run.stage("tokenizer") as results:
        tokenizer = train_tokenizer(texts["train"]["text"], size.vocab_size)
        blocks = {split: pack(documents, tokenizer, size.block_size) for split, documents in texts.items()}
        blocks["held_out"] = first(blocks["held_out"], HELD_OUT_BLOCKS)
        results["vocab_size"] = len(tokenizer)
        results["tokens"] = {split: len(rows) * size.block_size for split, rows in blocks.items()}
        print(f"{len(tokenizer):,} entries; {results['tokens']['train']:,} tokens to train on")

    configs = {folder: parse_variant(name).config(size, tokenizer) for folder, name in MODELS.items()}
    if steps is None:
        with run.stage("timing") as results:
            seconds = time_steps(configs, size, blocks, seed)
            steps = choose_steps(deadline - time.monotonic(), seconds, size)
            results["timing"] = {"seconds_per_step": seconds, "chosen_steps": steps}
            print(f"{steps:,} steps of {size.step_tokens:,} tokens for each model")

    for name, config in configs.items():
        with run.stage(f"train {name}") as results:
            model, trained = train_model(config, size, blocks, steps, seed)
            with run.writing(name) as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                write_table(trained.pop("layer_rates"), folder)
            results["models"][name] = trained
            print(f"held-out loss {trained['held_out_loss']:.3f}, perplexity {trained['perplexity']:.1f}")

    with run.stage("plot"), run.writing("loss.png") as path:
        plot_losses(run.results["models"], path)

    for name in configs:
        with run.stage(f"score {name}") as results:
            model = AutoModelForCausalLM.from_pretrained(run.folder / name)
            tokenizer = AutoTokenizer.from_pretrained(run.folder / name)
            results["models"][name]["continuations"] = continue_prompts(model, tokenizer, questions, seed)
            results["models"][name]["zero_shot"] = score_continuations(model, tokenizer, questions)

    print(f"\n{comparison_table(run.results['models'])}")
    print(f"\nOne seed and {steps:,} steps: this shows that everything runs, not which model is better.")
    print(f"Checkpoints, results.json and loss.png are in {run.folder}")
    return run.results


def train_model(config, size, blocks, steps, seed) -> tuple:
    """What [`train`] gives, with a progress bar and without checkpoints on the way."""
    training = Training(steps, size.batch_size, size.learning_rate, seed, layerwise_lr=True)
    with tempfile.TemporaryDirectory() as scratch:
        return train(config, training, blocks, scratch, callbacks=[LossBar()])


def first(rows, count):
    return rows.select(range(min(count, len(rows))))


def time_steps(configs, size, blocks, seed) -> dict:
    """The seconds that a training step of each model takes, from a few steps that are thrown away."""
    blocks = {**blocks, "held_out": first(blocks["held_out"], size.batch_size)}
    runs = {name: train_model(config, size, blocks, TIMED_STEPS, seed) for name, config in configs.items()}
    return {name: trained["seconds_per_step"] for name, (_, trained) in runs.items()}


def choose_steps(seconds_left, seconds_per_step, size) -> int:
    """The largest number of steps for each model that leaves time to evaluate both."""
    held_out_tokens = (HELD_OUT_POINTS + 1) * HELD_OUT_BLOCKS * size.block_size
    forward_tokens = held_out_tokens + QUESTIONS * NUM_CHOICES * QUESTION_TOKENS
    evaluation = math.ceil(forward_tokens / 3 / size.step_tokens)  # in steps: a step costs about three forward passes
    fixed_seconds, margin = 15, 0.92  # start-up of lm-eval, generation, saving; timing is never exact
    steps = int((seconds_left * margin - fixed_seconds) / sum(seconds_per_step.values())) - evaluation
    if steps < 1:
        raise ValueError(
            f"minutes: the {seconds_left:.0f} seconds left after collecting text and timing are too few to train and "
            f"evaluate at {sum(seconds_per_step.values()):.2f} seconds a step of both; allow more minutes, a smaller "
            f"size, or set steps"
        )
    return steps


def plot_losses(models, path):
    """Draw the training losses of the models as lines and their held-out losses as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="training step", ylabel="cross-entropy (nats per token)")
    for name, model in models.items():
        (line,) = axes.plot(*zip(*model["train_losses"], strict=True), label=f"{TITLES[name]}, training")
        points = zip(*model["held_out_losses"], strict=True)
        axes.plot(*points, "o", color=line.get_color(), label=f"{TITLES[name]}, held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def continue_prompts(model, tokenizer, questions, seed) -> list[dict]:
    """Sample and print a continuation of the first few held-out contexts."""
    set_seed(seed)
    continuations = []
    for question in questions.select(range(PROMPTS)):
        prompt = question["context"][-200:]
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=0.8, top_p=0.95)
        text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"  ...{prompt[-60:]!r} -> {text!r}")
        original = question["choices"][question["label"]]
        continuations.append({"prompt": prompt, "continuation": text, "original": original})
    return continuations


def comparison_table(models) -> str:
    """What was measured of the models, side by side."""
    rows = {
        "": lambda name, model: TITLES[name],
        "parameters": lambda name, model: f"{model['parameters']:,}",
        "effective depth": lambda name, model: f"{model['effective_depth']}",
        "training tokens": lambda name, model: f"{model['tokens']:,}",
        "seconds per step": lambda name, model: f"{model['seconds_per_step']:.3f}",
        "held-out loss": lambda name, model: f"{model['held_out_loss']:.3f}",
        "held-out perplexity": lambda name, model: f"{model['perplexity']:.1f}",
        "zero-shot accuracy, %": lambda name, model: percent(model["zero_shot"], "acc"),
        "the same, per character": lambda name, model: percent(model["zero_shot"], "acc_norm"),
    }
    lines = [f"{title:<26}" + "".join(f"{cell(*item):>16}" for item in models.items()) for title, cell in rows.items()]
    return "\n".join(lines)


def percent(scores, metric) -> str:
    return f"{100 * scores[metric]:.1f} ± {100 * scores[f'{metric}_stderr']:.1f}"


def add_command(subparsers):
    """Add `asymloop demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train AsymLoop and its matched Full Loop on real text in a few minutes, and compare them",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", choices=DEMO_SIZES, default="small", help="of the models")
    parser.add_argument("--minutes", type=float, default=6.0, help="that everything together may take")
    parser.add_argument("--steps", type=int, help="training steps of each model, instead of what fits the minutes")
    parser.add_argument("--output", default="demo-run", help="a new or an empty folder")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.set_defaults(run=run_command)


def run_command(args):
    """Run `asymloop demo` with parsed arguments."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    run_demo(args.output, args.size, args.minutes, args.steps, args.seed)
