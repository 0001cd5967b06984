"""The size of the installed documentation, and how long it takes to read, tokenize and pack.

python benchmarks/corpus.py
"""

import time

from datasets.utils.logging import disable_progress_bar

from asymloop_hf.corpus import load_corpus
from asymloop_hf.packing import pack
from asymloop_hf.tokenizer import train_tokenizer


def timed(label: str, function, *arguments):
    started = time.perf_counter()
    result = function(*arguments)
    print(f"{label}: {time.perf_counter() - started:.0f} s", flush=True)
    return result


def main() -> None:
    disable_progress_bar()
    corpus = timed("load_corpus", load_corpus, "installed-docs")
    texts = [text for split in corpus.values() for text in split["text"]]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} texts ({len(corpus['held_out'])} held out), {megabytes:.1f} MB")
    for vocab_size in (4096, 8192):
        tokenizer = timed(f"train_tokenizer {vocab_size}", train_tokenizer, corpus["train"]["text"], vocab_size)
        counts = {split: len(timed(f"pack {split}", pack, rows, tokenizer, 512)) for split, rows in corpus.items()}
        print(f"vocabulary {vocab_size}: {512 * sum(counts.values()):,} tokens in blocks of 512: {counts}")


if __name__ == "__main__":
    main()
