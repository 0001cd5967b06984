"""What the embeddings' scale and the injection do: the state's size at each visit at initialisation, and short runs.

    python benchmarks/initialisation.py states          # a few seconds
    python benchmarks/initialisation.py runs            # half an hour on two cores

`runs` trains AsymLoop and its matched Full Loop on the installed documentation for each embedding scale and injection,
with one seed, the same tokens, order and schedule.
"""

import argparse
import itertools
import math

import torch
from datasets.utils.logging import disable_progress_bar
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup, set_seed

from asymloop_hf import AsymLoopConfig
from asymloop_hf.corpus import load_corpus
from asymloop_hf.packing import pack
from asymloop_hf.tokenizer import train_tokenizer

BLOCK, BATCH, HELD_OUT_BLOCKS = 256, 2, 64


@torch.no_grad()
def state_sizes(model, input_ids) -> list[float]:
    """Root mean square of the state before each visit, for a batch of random tokens."""
    states = model.eval()(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return [state.pow(2).mean().sqrt().item() for state in states[:-1]]


def show_states() -> None:
    input_ids = torch.randint(0, 32000, (1, 256), generator=torch.Generator().manual_seed(0))
    for std, injection in itertools.product((0.02, 0.3, 1.0), ("none", "state", "embedding")):
        set_seed(0)
        config = AsymLoopConfig.preset("60m", embedding_initializer_range=std, input_injection=injection)
        sizes = state_sizes(AutoModelForCausalLM.from_config(config), input_ids)
        print(f"embeddings {std:<5} injection {injection:<10}" + "".join(f"{size:6.2f}" for size in sizes))


def held_out_loss(model, blocks) -> float:
    model.eval()
    batches = [{name: rows[i : i + BATCH] for name, rows in blocks.items()} for i in range(0, HELD_OUT_BLOCKS, BATCH)]
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss.item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def train(config, blocks, steps: int, rate: float) -> float:
    """The held-out loss after `steps` steps of AdamW."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    for step in range(steps):
        batch = {name: rows[step * BATCH : (step + 1) * BATCH] for name, rows in blocks["train"].items()}
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return held_out_loss(model, blocks["held_out"])


def run(steps: int, rate: float) -> None:
    disable_progress_bar()
    texts = load_corpus("installed-docs")
    tokenizer = train_tokenizer(texts["train"]["text"], 4096)
    counts = {"train": steps * BATCH, "held_out": HELD_OUT_BLOCKS}
    blocks = {}
    for split, count in counts.items():
        packed = pack(texts[split].shuffle(seed=0), tokenizer, BLOCK).shuffle(seed=0).select(range(count))
        blocks[split] = packed.with_format("torch")[:]
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
    sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_loops": 3, "max_position_embeddings": BLOCK}
    for make in (lambda config: config, AsymLoopConfig.matched_full_loop):
        for std, injection in (
            (0.3, "embedding"),
            (0.3, "none"),
            (0.02, "embedding"),
            (0.02, "none"),
            (0.6, "embedding"),
            (1.0, "embedding"),
        ):
            config = make(AsymLoopConfig(**sizes, embedding_initializer_range=std, input_injection=injection))
            loss = train(config, blocks, steps, rate)
            print(f"{config.model_type} {std:<5}{injection:<10} {loss:.3f} ({math.exp(loss):.1f})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("states", "runs"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    arguments = parser.parse_args()
    show_states() if arguments.what == "states" else run(arguments.steps, arguments.rate)
