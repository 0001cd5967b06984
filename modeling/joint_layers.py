"""How a layer of Transformers takes part in joint attention, unchanged.

A layer hands its rotated key/values to a cache, and what comes back, with its queries, to the attention function that
its configuration names. So an encoder layer needs a cache that also records the global KV, and a decoder layer one
that carries it to an attention function with two sources.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_looped import require
from .joint_attention import concatenate, joint_attention
from .joint_mask import JointMask, is_hidden


class KeyValueRecorder:
    """
    The cache view of an encoder layer: fills its slot of `cache`, if there is one, and keeps in `keys` and `values`,
    of shape `(batch, num_key_value_heads, length, head_dim)`, what the layer attends to: the global KV.
    """

    def __init__(self, cache: Cache | None):
        self.cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self.cache is not None:
            key_states, value_states = self.cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class JointKeyValues:
    """
    The cache view of one visit of a decoder layer: fills the visit's slot of `cache`, if there is one, with local KV,
    and carries the global KV beside it to the attention function, which leaves in `global_share`, if it is wanted, the
    share of each query's attention that the global source gets, of shape `(batch, num_attention_heads, length)`.
    """

    def __init__(
        self, global_keys: Tensor, global_values: Tensor, cache: Cache | None, slot: int, wants_share: bool = False
    ):
        self.global_keys = global_keys
        self.global_values = global_values
        self.cache = cache
        self.slot = slot
        self.wants_share = wants_share
        self.global_share: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self.cache is None:
            return key_states, value_states
        return self.cache.update(key_states, value_states, self.slot, *args, **kwargs)


def eager_joint_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: JointMask,
    scaling: float,
    dropout: float = 0.0,
    *,
    sources: JointKeyValues,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """The readable reference; its attention weights are over `[global ; local]`."""
    tensors = (query, sources.global_keys, sources.global_values, key, value)
    keys, values, mask = concatenate(*tensors, attention_mask)
    output, weights = eager_attention_forward(module, query, keys, values, mask, scaling, dropout)
    if attention_mask.may_hide_all:
        sees_nothing = is_hidden(mask, mask.dtype).all(-1)
        output = output.masked_fill(sees_nothing.transpose(1, 2)[..., None], 0)
        weights = weights.masked_fill(sees_nothing[..., None], 0)
    if sources.wants_share:
        undropped = weights
        if dropout > 0:
            _, undropped = eager_attention_forward(module, query.detach(), keys.detach(), values, mask, scaling)
        sources.global_share = undropped[..., : sources.global_keys.shape[2]].detach().sum(-1)
    return output, weights


def joint_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: JointMask,
    scaling: float,
    dropout: float = 0.0,
    *,
    sources: JointKeyValues,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """The fused way; its kernels have no dropout."""
    if dropout > 0:
        tensors = (query, key, value)
        return eager_joint_attention_forward(module, *tensors, attention_mask, scaling, dropout, sources=sources)
    tensors = (query, sources.global_keys, sources.global_values, key, value)
    output, sources.global_share = joint_attention(*tensors, attention_mask, scaling, sources.wants_share)
    return output.transpose(1, 2), None


# Code that travels with a checkpoint may be loaded beside the installed package: each copy has its own functions.
IMPLEMENTATIONS = {
    "eager": (f"{__name__}.eager_joint_attention", eager_joint_attention_forward),
    "sdpa": (f"{__name__}.joint_attention", joint_attention_forward),
}
for name, function in IMPLEMENTATIONS.values():
    AttentionInterface.register(name, function)


class JointAttentionConfig:
    """A configuration as the attention of a decoder layer sees it: it names the joint form of the implementation."""

    def __init__(self, config):
        self.config = config

    def __getattr__(self, name: str):
        if name == "config":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.config, name)

    @property
    def _attn_implementation(self) -> str:
        implementation = self.config._attn_implementation
        known = implementation in IMPLEMENTATIONS
        require(known, "attn_implementation", implementation, f"one of {tuple(IMPLEMENTATIONS)}")
        return IMPLEMENTATIONS[implementation][0]
