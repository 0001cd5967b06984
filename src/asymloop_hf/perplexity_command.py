"""`asymloop perplexity`: what a checkpoint predicts of held-out documents, by loop count and position."""

import argparse
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch

from .checkpoints import load_checkpoint
from .command_options import add_device, add_loop_counts, check_new_file, positive_int
from .corpus import load_corpus, load_documents
from .packing import tokenize_documents
from .perplexity import Perplexity, perplexity
from .whole_writes import write_whole


def measure(arguments: argparse.Namespace) -> None:
    """The command `asymloop perplexity`."""
    check_new_file(arguments.output)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else None)
    model, tokenizer = load_checkpoint(arguments.checkpoint, device)
    documents = (
        load_documents(arguments.documents) if arguments.documents else load_corpus(arguments.corpus)["held_out"]
    )
    texts = islice((row["text"] for row in documents), arguments.limit)
    tokens = (tokenize_documents([text], tokenizer)[0] for text in texts)
    found = perplexity(model, tokens, arguments.stride, arguments.num_loops, arguments.batch_size, progress=True)
    print(format_perplexity(found))
    if arguments.output is not None:
        written = {str(count): asdict(measured) for count, measured in found.items()}
        write_whole(arguments.output, json.dumps(written, indent=2))


def format_perplexity(found: dict[int, Perplexity]) -> str:
    """A table: a column for each loop count; rows for all tokens and for those at each range of positions."""
    first = next(iter(found.values()))
    rows = [
        ["", *(f"{count} loop{'s' if count > 1 else ''}" for count in found)],
        ["perplexity", *(f"{measured.perplexity:.2f}" for measured in found.values())],
        ["loss, nats per token", *(f"{measured.loss:.4f}" for measured in found.values())],
    ]
    for start, bucket in first.positions.items():
        losses = (f"{measured.positions[start].loss:.4f}" for measured in found.values())
        rows.append([f"  from position {start} ({bucket.tokens:,} tokens)", *losses])
    table = "\n".join(f"{label:<40}" + "".join(f"{cell:>12}" for cell in cells) for label, *cells in rows)
    return f"{table}\n{first.tokens:,} tokens of {len(first.documents):,} documents"


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `asymloop perplexity` to the console command."""
    parser = commands.add_parser(
        "perplexity", help="held-out perplexity of a looped model, by loop count and position"
    )
    parser.add_argument("checkpoint", help="a folder or hub name")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--corpus", help="a corpus whose held-out documents are read, as examples/pretrain.py holds out"
    )
    source.add_argument(
        "--documents", help="a file or folder, or a dataset of the hub, of which all documents are read"
    )
    parser.add_argument("--stride", type=positive_int, help="tokens between windows (default: half of the context)")
    add_loop_counts(parser)
    parser.add_argument("--limit", type=positive_int, help="documents (default: all)")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="windows at once (default: 8)")
    add_device(parser)
    parser.add_argument("--output", type=Path, help="a new json file, which also has the loss of each document")
    parser.set_defaults(run=measure)
