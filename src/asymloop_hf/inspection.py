"""`asymloop inspect`: what a model costs, and where its attention and its tokens go on a text."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from transformers import AutoModelForCausalLM

from .attention_share import MAX_BLOCKS, attention_share, format_shares, plot_shares
from .budget import EXAMPLE_WINDOW, format_table, load_config, matched_budgets
from .expert_use import expert_use, format_use, plot_use
from .modeling.backbones import BACKBONES
from .modeling.configuration_asymloop import PRESETS
from .tokenizer import load_tokenizer

DEFAULT_PLOT = Path("attention-share.png")
DEFAULT_EXPERT_PLOT = Path("expert-use.png")


def inspect(arguments: argparse.Namespace) -> None:
    """The command `asymloop inspect`."""
    config = load_config(arguments.model, arguments.backbone)
    context = config.max_position_embeddings if arguments.context is None else arguments.context
    budgets = matched_budgets(config, context)
    check_plot("plot", arguments.plot, arguments.text)
    check_plot("expert_plot", arguments.expert_plot, arguments.text)
    if arguments.expert_plot is not None and config.num_experts == 0:
        raise ValueError(f"expert_plot={str(arguments.expert_plot)!r} is not allowed: the model has no experts.")
    shares, uses = (None, None) if arguments.text is None else measure(arguments.model, arguments.text)
    if arguments.json:
        printed = {"context": context, **{name: asdict(costs) for name, costs in budgets.items()}}
        if shares is not None:
            printed["attention_share"] = shares.tolist()
        if uses is not None:
            as_lists = {name: {"use": use.use.tolist(), "change": use.change.tolist()} for name, use in uses.items()}
            printed["expert_use"] = as_lists
        print(json.dumps(printed, indent=2))
    else:
        print(format_table(budgets, context, getattr(config, "local_window", None) or EXAMPLE_WINDOW))
    for measured, as_text, plot, file, what in (
        (shares, format_shares, plot_shares, arguments.plot or DEFAULT_PLOT, "by head"),
        (uses, format_use, plot_use, arguments.expert_plot or DEFAULT_EXPERT_PLOT, "by expert"),
    ):
        if measured is None:
            continue
        plot(measured, file)
        if not arguments.json:
            print(f"\n{as_text(measured)}\n{what}: {file}")


def check_plot(option: str, plot: Path | None, text: Path | None) -> None:
    if plot is None:
        return
    if text is None:
        raise ValueError(f"{option}={str(plot)!r} is not allowed without --text: it shows what happens on a text.")
    if plot.suffix != ".png" or not plot.parent.is_dir():
        raise ValueError(f"{option}={str(plot)!r} is not allowed: it must be a .png file in a folder that exists.")


def measure(checkpoint: str, file: Path) -> tuple:
    """What there is of a checkpoint's [`attention_share`] and [`expert_use`] on the text in `file`, else `None`."""
    model, input_ids = read(checkpoint, file)
    uses = expert_use(model, input_ids) if model.config.num_experts > 0 else None
    has_shares = model.config.model_type == "asymloop" or uses is None
    return attention_share(model, input_ids) if has_shares else None, uses


def read(checkpoint: str, file: Path) -> tuple:
    """The model of a checkpoint, and the tokens of the text in `file`, of shape `(length,)`."""
    if checkpoint in PRESETS:
        raise ValueError(f"text={str(file)!r} is not allowed with a preset, which has no weights: name a checkpoint.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text={str(file)!r} is not allowed: it must be a file of UTF-8 text ({error}).") from error
    if not text:
        raise ValueError(f"text={str(file)!r} is not allowed: the file must not be empty.")
    tokenizer = load_tokenizer(checkpoint)
    input_ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    num_read = MAX_BLOCKS * model.config.max_position_embeddings
    if len(input_ids) > num_read:
        print(f"{file}: the first {num_read:,} of {len(input_ids):,} tokens are read", file=sys.stderr)
    return model, input_ids


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `asymloop inspect` to the console command."""
    parser = commands.add_parser("inspect", help="parameters, depth, FLOPs and cache bytes of a model and its partner")
    parser.add_argument("model", help=f"a preset ({', '.join(PRESETS)}), a checkpoint folder or a hub name")
    parser.add_argument("--backbone", help=f"of a preset: {', '.join(BACKBONES)} (default: llama)")
    parser.add_argument("--context", type=int, help="tokens in the sequence (default: the longest of the model)")
    parser.add_argument("--json", action="store_true", help="print json instead of a table")
    parser.add_argument(
        "--text",
        type=Path,
        help="a text file: how much attention goes to global KV, and which experts are picked, by loop and layer",
    )
    parser.add_argument("--plot", type=Path, help=f"where its plot is written (default: {DEFAULT_PLOT})")
    parser.add_argument(
        "--expert-plot", type=Path, help=f"where the plot of experts is written (default: {DEFAULT_EXPERT_PLOT})"
    )
    parser.set_defaults(run=inspect)
