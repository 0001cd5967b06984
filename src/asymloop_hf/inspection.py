"""`asymloop inspect`: what a model costs, and where its attention goes on a text."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from .attention_share import MAX_BLOCKS, attention_share, format_shares, plot_shares
from .budget import EXAMPLE_WINDOW, format_table, load_config, matched_budgets
from .modeling.configuration_asymloop import PRESETS

DEFAULT_PLOT = Path("attention-share.png")


def inspect(arguments: argparse.Namespace) -> None:
    """The command `asymloop inspect`."""
    config = load_config(arguments.model)
    context = config.max_position_embeddings if arguments.context is None else arguments.context
    budgets = matched_budgets(config, context)
    check_plot(arguments)
    shares = None if arguments.text is None else shares_on(arguments.model, arguments.text)
    if arguments.json:
        printed = {"context": context, **{name: asdict(costs) for name, costs in budgets.items()}}
        if shares is not None:
            printed["attention_share"] = shares.tolist()
        print(json.dumps(printed, indent=2))
    else:
        print(format_table(budgets, context, getattr(config, "local_window", None) or EXAMPLE_WINDOW))
        if shares is not None:
            print(f"\n{format_shares(shares)}")
    if shares is not None:
        plot = arguments.plot or DEFAULT_PLOT
        plot_shares(shares, plot)
        if not arguments.json:
            print(f"by head: {plot}")


def check_plot(arguments: argparse.Namespace) -> None:
    plot = arguments.plot
    if plot is None:
        return
    if arguments.text is None:
        raise ValueError(f"plot={str(plot)!r} is not allowed without --text: it shows where attention goes on a text.")
    if plot.suffix != ".png" or not plot.parent.is_dir():
        raise ValueError(f"plot={str(plot)!r} is not allowed: it must be a .png file in a folder that exists.")


def shares_on(checkpoint: str, file: Path):
    """The attention shares of a checkpoint on the text in `file`: see [`attention_share`]."""
    if checkpoint in PRESETS:
        raise ValueError(f"text={str(file)!r} is not allowed with a preset, which has no weights: name a checkpoint.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text={str(file)!r} is not allowed: it must be a file of UTF-8 text ({error}).") from error
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if not text:
        raise ValueError(f"text={str(file)!r} is not allowed: the file must not be empty.")
    input_ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    read = MAX_BLOCKS * load_config(checkpoint).max_position_embeddings
    if len(input_ids) > read:
        print(f"{file}: the first {read:,} of {len(input_ids):,} tokens are read", file=sys.stderr)
    return attention_share(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), input_ids)


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `asymloop inspect` to the console command."""
    parser = commands.add_parser("inspect", help="parameters, depth, FLOPs and cache bytes of a model and its partner")
    parser.add_argument("model", help=f"a preset ({', '.join(PRESETS)}), a checkpoint folder or a hub name")
    parser.add_argument("--context", type=int, help="tokens in the sequence (default: the longest of the model)")
    parser.add_argument("--json", action="store_true", help="print json instead of a table")
    parser.add_argument(
        "--text", type=Path, help="a text file: how much attention goes to global KV, by loop and layer"
    )
    parser.add_argument("--plot", type=Path, help=f"where its plot is written (default: {DEFAULT_PLOT})")
    parser.set_defaults(run=inspect)
