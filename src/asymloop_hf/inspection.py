"""`asymloop inspect`: what a model costs, and where its attention goes on a text."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from .attention_share import attention_share, format_shares, plot_shares
from .budget import EXAMPLE_WINDOW, format_table, load_config, matched_budgets
from .modeling.configuration_asymloop import PRESETS


def inspect(arguments: argparse.Namespace) -> None:
    """The command `asymloop inspect`."""
    config = load_config(arguments.model)
    context = config.max_position_embeddings if arguments.context is None else arguments.context
    budgets = matched_budgets(config, context)
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
        plot_shares(shares, arguments.plot)
        if not arguments.json:
            print(f"by head: {arguments.plot}")


def shares_on(checkpoint: str, file: Path):
    """The attention shares of a checkpoint on the text in `file`: see [`attention_share`]."""
    if checkpoint in PRESETS:
        raise ValueError(f"text={str(file)!r} is not allowed with a preset, which has no weights: name a checkpoint.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text={str(file)!r} is not allowed: it must be a file of UTF-8 text ({error}).") from error
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    input_ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
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
    parser.add_argument("--plot", type=Path, default=Path("attention-share.png"), help="where its plot is written")
    parser.set_defaults(run=inspect)
