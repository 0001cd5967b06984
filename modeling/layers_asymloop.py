"""The layers of AsymLoop: those of each backbone, as an encoder and as a decoder layer."""

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo.modeling_olmo import OlmoDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.olmoe.modeling_olmoe import OlmoeDecoderLayer

from .configuration_asymloop import AsymLoopConfig
from .joint_layers import JointAttentionConfig, JointKeyValues, KeyValueRecorder
from .modeling_looped import CACHE_NAME


class AsymLoopEncoderLayer:
    """An ordinary causal layer that also returns its keys and values: the global KV."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        recorder = KeyValueRecorder(kwargs.pop(CACHE_NAME))
        hidden_states = super().forward(hidden_states, **{CACHE_NAME: recorder}, **kwargs)
        return hidden_states, recorder.keys, recorder.values


class AsymLoopDecoderLayer:
    """An ordinary causal layer whose attention reads global and local KV through one softmax."""

    def __init__(self, config: AsymLoopConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn.config = JointAttentionConfig(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        global_keys: torch.Tensor,
        global_values: torch.Tensor,
        slot: int,
        output_attention_share: bool = False,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sources = JointKeyValues(global_keys, global_values, kwargs.pop(CACHE_NAME), slot, output_attention_share)
        hidden_states = super().forward(hidden_states, sources=sources, **{CACHE_NAME: sources}, **kwargs)
        return hidden_states, sources.global_share


class AsymLoopLlamaEncoderLayer(AsymLoopEncoderLayer, LlamaDecoderLayer): ...


class AsymLoopLlamaDecoderLayer(AsymLoopDecoderLayer, LlamaDecoderLayer): ...


class AsymLoopOlmoEncoderLayer(AsymLoopEncoderLayer, OlmoDecoderLayer): ...


class AsymLoopOlmoDecoderLayer(AsymLoopDecoderLayer, OlmoDecoderLayer): ...


class AsymLoopOlmo2EncoderLayer(AsymLoopEncoderLayer, Olmo2DecoderLayer): ...


class AsymLoopOlmo2DecoderLayer(AsymLoopDecoderLayer, Olmo2DecoderLayer): ...


class AsymLoopOlmoeEncoderLayer(AsymLoopEncoderLayer, OlmoeDecoderLayer): ...


class AsymLoopOlmoeDecoderLayer(AsymLoopDecoderLayer, OlmoeDecoderLayer): ...


ENCODER_LAYERS = {
    "llama": AsymLoopLlamaEncoderLayer,
    "olmo": AsymLoopOlmoEncoderLayer,
    "olmo2": AsymLoopOlmo2EncoderLayer,
    "olmoe": AsymLoopOlmoeEncoderLayer,
}
DECODER_LAYERS = {
    "llama": AsymLoopLlamaDecoderLayer,
    "olmo": AsymLoopOlmoDecoderLayer,
    "olmo2": AsymLoopOlmo2DecoderLayer,
    "olmoe": AsymLoopOlmoeDecoderLayer,
}
