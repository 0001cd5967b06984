"""The logits of a looped model at several loop counts, from one forward pass."""

from collections.abc import Sequence

import torch

LOOPED = ("asymloop", "fullloop")  # the model types that have loops


@torch.no_grad()
def logits_by_loops(model, input_ids: torch.LongTensor, loop_counts: Sequence[int]) -> list[torch.Tensor]:
    """
    The logits at several loop counts from one forward pass: after each loop the state is what a model with as many
    loops ends with.

    Args:
        input_ids: of shape `(batch, length)`.
        loop_counts: as for `model(num_loops=...)`.

    Returns:
        For each count, of shape `(batch, length, vocab_size)`.
    """
    config, most = model.config, max(loop_counts)
    if config.model_type == "asymloop":
        before, per_loop = config.num_encoder_layers, config.num_decoder_layers
    else:
        before, per_loop = 0, config.num_layers
    has_fewer = any(count != most for count in loop_counts)
    outputs = model.model(input_ids=input_ids, use_cache=False, num_loops=most, output_hidden_states=has_fewer)

    def last_state(count: int) -> torch.Tensor:
        if count == most:
            return outputs.last_hidden_state
        return model.model.norm(outputs.hidden_states[before + count * per_loop])

    return [model.lm_head(last_state(count)) for count in loop_counts]
