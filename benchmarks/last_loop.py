"""What `local_kv="last_loop"` costs in perplexity: held-out text read token by token, as in generation.

python benchmarks/last_loop.py demo-run/asymloop
"""

import argparse
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import asymloop_hf
from asymloop_hf.corpus import load_corpus
from asymloop_hf.packing import pack


@torch.no_grad()
def perplexity(model, input_ids: torch.LongTensor, local_kv: str, num_loops: int, prompt: int) -> float:
    """Perplexity of the tokens after the first `prompt`, which are read at once."""
    cache = asymloop_hf.AsymLoopCache(model.config, num_loops, local_kv)
    logits = [model(input_ids[:, :prompt], cache=cache).logits[:, -1:]]
    for position in range(prompt, input_ids.shape[1] - 1):
        logits.append(model(input_ids[:, position : position + 1], cache=cache).logits)
    losses = torch.nn.functional.cross_entropy(torch.cat(logits, 1).transpose(1, 2), input_ids[:, prompt:])
    return math.exp(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--blocks", type=int, default=64, help="held-out blocks of the model's context")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    length = model.config.max_position_embeddings
    blocks = pack(load_corpus("installed-docs")["held_out"].shuffle(seed=0), tokenizer, length)
    input_ids = torch.tensor(blocks[: arguments.blocks]["input_ids"])
    for num_loops in range(1, model.config.num_loops + 1):
        for prompt in (1, length // 2):
            exact, lean = (perplexity(model, input_ids, kind, num_loops, prompt) for kind in ("per_loop", "last_loop"))
            change = 100 * (lean / exact - 1)
            print(
                f"loops {num_loops}, prompt {prompt:3}: per_loop {exact:.2f}, last_loop {lean:.2f} ({change:+.2f} %)"
            )


if __name__ == "__main__":
    main()
