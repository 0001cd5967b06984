"""The load-balancing loss of sparse models, over every visit: a router of a looped layer counts once for each loop."""

import torch
from transformers import PreTrainedConfig
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func


def load_balancing_loss(
    config: PreTrainedConfig,
    router_logits: tuple[torch.Tensor, ...],
    attention_mask: torch.Tensor | None,
    batch_size: int,
) -> torch.Tensor:
    """
    Transformers' loss, the Switch Transformer's (Fedus et al., 2021), which is at least `num_experts_per_tok`.

    Args:
        router_logits: of each visit, of shape `(batch_size * length, num_experts)`. Where the visits have different
            lengths, because a cache lets the decoder skip positions or catch up with pending ones, the last positions
            count, which all of them have.
        attention_mask: padding of shape `(batch_size, length or more)`, which does not count; another mask is ignored.
    """
    lengths = [logits.shape[0] // batch_size for logits in router_logits]
    length = min(lengths)
    if max(lengths) > length:
        by_position = (logits.unflatten(0, (batch_size, -1)) for logits in router_logits)
        router_logits = tuple(logits[:, -length:].flatten(0, 1) for logits in by_position)
    is_padding_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
    padding = attention_mask[:, -length:] if is_padding_mask else None
    return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, padding)
