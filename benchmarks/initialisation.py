"""What the embeddings' scale and the injection do to the state's size at each visit, at initialisation.

    python benchmarks/initialisation.py          # a few seconds

What they do to training, `asymloop compare` tells: see docs/architecture.md.
"""

import itertools

import torch
from transformers import AutoModelForCausalLM, set_seed

from asymloop_hf import AsymLoopConfig


@torch.no_grad()
def state_sizes(model, input_ids) -> list[float]:
    """Root mean square of the state before each visit, for a batch of random tokens."""
    states = model.eval()(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return [state.pow(2).mean().sqrt().item() for state in states[:-1]]


if __name__ == "__main__":
    input_ids = torch.randint(0, 32000, (1, 256), generator=torch.Generator().manual_seed(0))
    for std, injection in itertools.product((0.02, 0.3, 1.0), ("none", "state", "embedding")):
        set_seed(0)
        config = AsymLoopConfig.preset("60m", embedding_initializer_range=std, input_injection=injection)
        sizes = state_sizes(AutoModelForCausalLM.from_config(config), input_ids)
        print(f"embeddings {std:<5} injection {injection:<10}" + "".join(f"{size:6.2f}" for size in sizes))
