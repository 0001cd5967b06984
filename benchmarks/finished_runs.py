"""Training runs that a benchmark does once: those in its output file are not done again."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset

from asymloop_hf.corpus import load_corpus
from asymloop_hf.packing import pack
from asymloop_hf.tokenizer import train_tokenizer

HELD_OUT_BLOCKS = 64


class FinishedRuns:
    """
    The runs of one benchmark, a line of json each.

    Args:
        output: the file; runs that it holds already are not done again.
    """

    def __init__(self, output: Path):
        self.output = output
        lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        self.finished = [json.loads(line) for line in lines]

    def once(self, settings: dict, run: Callable[[dict], dict]) -> dict:
        """The settings with what `run` of them gives and the seconds that it took; the new ones are written down."""
        for finished in self.finished:
            if settings.items() <= finished.items():
                return finished
        started = time.monotonic()
        finished = settings | run(settings)
        finished["seconds"] = round(time.monotonic() - started, 1)
        with self.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finished) + "\n")
        self.finished.append(finished)
        print({name: value for name, value in finished.items() if not isinstance(value, dict)}, flush=True)
        return finished


def installed_docs(block_size: int, vocab_size: int) -> tuple[dict[str, Dataset], int]:
    """The blocks of the installed documentation for training and the held-out ones, and the size of the vocabulary."""
    texts = load_corpus("installed-docs")
    tokenizer = train_tokenizer(texts["train"]["text"], vocab_size)
    blocks = {split: pack(documents.shuffle(seed=0), tokenizer, block_size) for split, documents in texts.items()}
    blocks["held_out"] = blocks["held_out"].shuffle(seed=0).select(range(HELD_OUT_BLOCKS))
    return blocks, len(tokenizer)
