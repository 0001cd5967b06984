"""The mask of joint attention: which global and which local keys each position sees."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
)
from transformers.utils import is_tracing

from .configuration_asymloop import AsymLoopConfig
from .configuration_looped import require
from .modeling_looped import check_padding


class JointMask(NamedTuple):
    """
    What joint attention hides besides the future. The last query is at the last key of each source.

    Args:
        window: a position sees its own local key and the `window - 1` before it; all of them if `None`. Where it sees
            only its own, it sees it even if that is padding.
        padding: of shape `(batch, keys)`, false at keys that are padding.
        documents: of shape `(batch, length)`, the number of the packed document that a position belongs to; a position
            sees its own document. Documents follow one another, and nothing is cached.
        global_mask, local_mask: ready masks of shape `(batch or 1, heads or 1, queries, keys)`, boolean (true: is
            seen) or additive, in the place of causality and everything above; with `window=1` no local one is needed.
            Padding beside them says only which queries are tokens.
    """

    window: int | None = None
    padding: Tensor | None = None
    documents: Tensor | None = None
    global_mask: Tensor | None = None
    local_mask: Tensor | None = None

    @property
    def may_hide_all(self) -> bool:
        """Whether there can be a query that sees no key at all."""
        return self.padding is not None or self.global_mask is not None

    def mean_over_tokens(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor of shape `(batch, heads, queries)` over the queries that are not padding."""
        if self.padding is None:
            return tensor.mean(-1)
        is_token = self.padding[:, None, -tensor.shape[-1] :]
        return (tensor * is_token).sum(-1) / is_token.sum(-1).clamp(min=1)


NO_MASK = JointMask()


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean (true: is seen) or additive mask as additive numbers, the lowest of which is that of `dtype`."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, lowest)
    return mask.to(dtype).clamp(min=lowest)


def is_hidden(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Where scores, or a log-sum-exp of them, are those of keys that an additive mask of `dtype` hides."""
    return scores < torch.finfo(dtype).min / 2


def band(num_rows: int, num_columns: int, window: int | None, like: Tensor, row_offset: int | None = None) -> Tensor:
    """
    The additive mask of causality and a window, of shape `(rows, columns)` and of the dtype and device of `like`.

    Args:
        row_offset: the column at the position of the first row; by default the last row is at the last column.
    """
    row_offset = num_columns - num_rows if row_offset is None else row_offset
    rows = torch.arange(row_offset, row_offset + num_rows, device=like.device)[:, None]
    columns = torch.arange(num_columns, device=like.device)
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return additive(seen, like.dtype)


def dense(mask: JointMask, query: Tensor, global_keys: Tensor, local_keys: Tensor) -> Tensor:
    """The whole mask over `[global ; local]`, additive and of shape `(batch or 1, heads or 1, queries, keys)`."""
    sources = ((global_keys, None, mask.global_mask), (local_keys, mask.window, mask.local_mask))
    masks = [_dense_source(mask, query, keys, window, given) for keys, window, given in sources]
    shape = [max(sizes) for sizes in zip(*(part.shape[:3] for part in masks), strict=True)]
    return torch.cat([part.expand(*shape, -1) for part in masks], dim=-1)


def _dense_source(mask: JointMask, query: Tensor, keys: Tensor, window: int | None, given: Tensor | None) -> Tensor:
    if given is not None:
        return additive(given, query.dtype)
    seen = band(query.shape[2], keys.shape[2], window, query)[None, None]
    if mask.padding is not None and window != 1:
        padding = additive(mask.padding[:, None, None, -keys.shape[2] :], query.dtype)
        seen = torch.minimum(seen, padding)
    if mask.documents is not None:
        same = mask.documents[:, None, :, None] == mask.documents[:, None, None, :]
        seen = torch.minimum(seen, additive(same, query.dtype))
    return seen


def joint_masks(
    config: AsymLoopConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | dict[str, Tensor] | None,
    position_ids: torch.LongTensor,
    cache: Cache | None,
    num_visited: int,
) -> tuple[Tensor | None, JointMask]:
    """
    The mask of the encoder and that of the decoder's last `num_visited` positions.

    Args:
        inputs_embeds: of shape `(batch, length, hidden_size)`; for the sizes and the dtype.
        attention_mask: padding of shape `(batch, past + length)`; or a ready mask of shape
            `(batch, heads or 1, length, keys)`, with a window one for `"full_attention"` and one for
            `"sliding_attention"`, as `generate` makes them for a static cache.

    Raises:
        `ValueError`: an attention mask of another shape.
    """
    full, local = _by_layer_type(config, attention_mask)
    for mask in (full, local):
        _check(mask, inputs_embeds, cache, num_visited)
    full, local = (_in_kind_of(config, mask, inputs_embeds.dtype) for mask in (full, local))
    encoder_mask = create_causal_mask(config, inputs_embeds, full, cache, position_ids)
    if full is not None and full.dim() == 4:
        if full.shape[-2] > num_visited:  # the visited positions have no local keys but their own
            full, local = full[..., -num_visited:, :], local[..., -num_visited:, -num_visited:]
        return encoder_mask, _ready(config, full, local)
    if cache is not None and cache.is_compileable:
        return encoder_mask, _static_mask(config, inputs_embeds, full, position_ids, cache)
    documents = None
    if full is None and cache is None:
        documents = find_packed_sequence_indices(position_ids.expand(inputs_embeds.shape[0], -1))
    padding = None if full is None or (not is_tracing(full) and full.all()) else full.bool()
    return encoder_mask, JointMask(config.local_window, padding, documents)


def _static_mask(
    config: AsymLoopConfig, inputs_embeds: Tensor, padding: Tensor | None, position_ids: Tensor, cache: Cache
) -> JointMask:
    """The mask over a cache that has room for more than the keys written so far."""
    options = {"position_ids": position_ids, "allow_is_causal_skip": False}
    global_mask = create_causal_mask(config, inputs_embeds, padding, cache, layer_idx=0, **options)
    create_mask = create_causal_mask if config.local_window is None else create_sliding_window_causal_mask
    local_mask = None
    if config.local_window != 1:
        first_local_slot = config.num_encoder_layers
        local_mask = create_mask(config, inputs_embeds, padding, cache, layer_idx=first_local_slot, **options)
    return _ready(config, global_mask, local_mask)._replace(padding=None if padding is None else padding.bool())


def _ready(config: AsymLoopConfig, global_mask: Tensor, local_mask: Tensor | None) -> JointMask:
    if config.local_window == 1:  # a position sees its own local key, whatever the global mask says
        return JointMask(window=1, global_mask=global_mask)
    return JointMask(global_mask=global_mask, local_mask=local_mask)


def _by_layer_type(config: AsymLoopConfig, attention_mask: Tensor | dict | None) -> list[Tensor | None]:
    """The masks that global and local KV start from."""
    windowed = config.local_window not in (None, 1)
    if isinstance(attention_mask, dict):
        kinds = ("full_attention", "sliding_attention" if windowed else "full_attention")
        complete = all(kind in attention_mask for kind in kinds)
        require(complete, "attention_mask", sorted(attention_mask), f"a dictionary with {' and '.join(set(kinds))}")
        return [attention_mask[kind] for kind in kinds]
    if windowed and attention_mask is not None and attention_mask.dim() == 4:
        raise ValueError(
            "attention_mask of 4 dimensions is not allowed with `local_window`: it must be a dictionary with one mask "
            "for 'full_attention' and one for 'sliding_attention'."
        )
    return [attention_mask, attention_mask]


def _check(mask: Tensor | None, inputs_embeds: Tensor, cache: Cache | None, num_visited: int) -> None:
    if mask is None or mask.dim() != 4:
        return check_padding(mask, inputs_embeds, cache)
    rows = mask.shape[-2]
    require(rows >= num_visited, "attention_mask.shape[-2]", rows, f"{num_visited}, the positions that are visited")


def _in_kind_of(config: AsymLoopConfig, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A ready mask in the kind that the encoder's attention implementation adds or applies."""
    if mask is None or mask.dim() != 4 or mask.is_floating_point():
        return mask
    return additive(mask.bool(), dtype) if config._attn_implementation == "eager" else mask.bool()
