"""Joint attention: one softmax over the global key/values of an encoder layer and the local ones of a decoder visit.

Layers come from Transformers unchanged. They hand their rotated key/values to a cache and attend to what it returns,
so the two views below are all that an encoder layer and a decoder layer need in the place of a cache.
"""

import torch
from transformers.cache_utils import Cache


class KeyValueRecorder:
    """
    The cache view of an encoder layer: fills its slot of `cache`, if there is one, and keeps in `keys` and `values`,
    of shape `(batch, num_key_value_heads, length, head_dim)`, what the layer attends to: the global KV.
    """

    def __init__(self, cache: Cache | None):
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is not None:
            key_states, value_states = self.cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class JointKeyValues:
    """
    The cache view of one visit of a decoder layer: fills the visit's slot of `cache`, if there is one, and has the
    layer attend to `[global ; local]`.
    """

    def __init__(self, global_keys: torch.Tensor, global_values: torch.Tensor, cache: Cache | None, slot: int):
        self.global_keys = global_keys
        self.global_values = global_values
        self.cache = cache
        self.slot = slot

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is not None:
            key_states, value_states = self.cache.update(key_states, value_states, self.slot, *args, **kwargs)
        keys = torch.cat([self.global_keys, key_states], dim=-2)
        values = torch.cat([self.global_values, value_states], dim=-2)
        return keys, values
