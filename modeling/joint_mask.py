"""The mask of joint attention: which global and which local keys each position sees."""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .cache_asymloop import AsymLoopCache
from .configuration_asymloop import AsymLoopConfig
from .configuration_looped import require
from .modeling_looped import check_padding

Mask = torch.Tensor | None


def joint_masks(
    config: AsymLoopConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    position_ids: torch.LongTensor,
    cache: Cache | None,
    num_visited: int,
) -> tuple[Mask, Mask]:
    """
    The mask of the encoder and that of the decoder's last `num_visited` positions over `[global ; local]`.

    Args:
        inputs_embeds: of shape `(batch, length, hidden_size)`; for the sizes and the dtype.
        attention_mask: padding of shape `(batch, past + length)`; or a ready mask of shape
            `(batch, heads or 1, length, keys)`, with a window one for `"full_attention"` and one for
            `"sliding_attention"`, as `generate` makes them for a static cache.

    Returns:
        Two masks of shape `(batch, heads or 1, queries, keys)`, boolean or additive as the attention implementation
        wants them, or `None` where everything allowed by causality is seen.

    Raises:
        `ValueError`: an attention mask of another shape.
    """
    full, local = _by_layer_type(config, attention_mask)
    full, local = (_checked(config, mask, inputs_embeds, cache, num_visited) for mask in (full, local))
    encoder_mask = create_causal_mask(config, inputs_embeds, full, cache, position_ids)
    full, local = (_last_rows(mask, num_visited) for mask in (full, local))
    spans = (cache, cache)
    if isinstance(cache, AsymLoopCache):
        spans = cache.mask_spans(inputs_embeds.shape[1], num_visited)
    visited = inputs_embeds.new_empty((inputs_embeds.shape[0], num_visited, 0))

    def source_masks(may_skip: bool) -> tuple[Mask, Mask]:
        options = {"position_ids": position_ids, "allow_is_causal_skip": may_skip}
        global_mask = create_causal_mask(config, visited, full, spans[0], layer_idx=0, **options)
        if config.local_window == 1:
            return global_mask, None if global_mask is None else self_only_mask(global_mask)
        create_mask = create_causal_mask if config.local_window is None else create_sliding_window_causal_mask
        first_local_slot = config.num_encoder_layers
        return global_mask, create_mask(config, visited, local, spans[1], layer_idx=first_local_slot, **options)

    # Only a single position that sees every key of both sources can do without a mask.
    masks = source_masks(may_skip=num_visited == 1)
    if all(mask is None for mask in masks):
        return encoder_mask, None
    if any(mask is None for mask in masks):
        masks = source_masks(may_skip=False)
    return encoder_mask, torch.cat(masks, dim=-1)


def self_only_mask(global_mask: torch.Tensor) -> torch.Tensor:
    """
    The local mask of a window of 1: every position sees itself only.

    Args:
        global_mask: mask of shape `(batch, heads or 1, length, keys)`, boolean (true: is seen) or additive.

    Returns:
        A mask of shape `(batch, heads or 1, length, length)` of the same kind.
    """
    length = global_mask.shape[-2]
    seen = torch.eye(length, dtype=torch.bool, device=global_mask.device).expand(*global_mask.shape[:-1], length)
    return seen if global_mask.dtype == torch.bool else _additive(seen, global_mask.dtype)


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _by_layer_type(config: AsymLoopConfig, attention_mask: torch.Tensor | dict | None) -> tuple[Mask, Mask]:
    """The masks that global and local KV start from."""
    windowed = config.local_window not in (None, 1)
    if isinstance(attention_mask, dict):
        kinds = ("full_attention", "sliding_attention" if windowed else "full_attention")
        complete = all(kind in attention_mask for kind in kinds)
        require(complete, "attention_mask", sorted(attention_mask), f"a dictionary with {' and '.join(set(kinds))}")
        return attention_mask[kinds[0]], attention_mask[kinds[1]]
    if windowed and attention_mask is not None and attention_mask.dim() == 4:
        raise ValueError(
            "attention_mask of 4 dimensions is not allowed with `local_window`: it must be a dictionary with one mask "
            "for 'full_attention' and one for 'sliding_attention'."
        )
    return attention_mask, attention_mask


def _checked(
    config: AsymLoopConfig, mask: Mask, inputs_embeds: torch.Tensor, cache: Cache | None, num_visited: int
) -> Mask:
    """A mask of an allowed shape; a ready one in the kind that the attention implementation adds or applies."""
    if mask is None:
        return None
    if mask.dim() != 4:
        check_padding(mask, inputs_embeds, cache)
        return mask
    rows = mask.shape[-2]
    require(rows >= num_visited, "attention_mask.shape[-2]", rows, f"{num_visited}, the positions that are visited")
    if mask.is_floating_point():
        return mask
    seen = mask.bool()
    return _additive(seen, inputs_embeds.dtype) if config._attn_implementation == "eager" else seen


def _last_rows(mask: Mask, num_visited: int) -> Mask:
    return mask[..., -num_visited:, :] if mask is not None and mask.dim() == 4 else mask
