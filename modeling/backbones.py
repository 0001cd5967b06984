"""The backbones: which modules of Transformers the layers are made of, and all else that sets one apart."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers import LlamaConfig, Olmo2Config, OlmoConfig, OlmoeConfig, PreTrainedConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo import modeling_olmo as olmo
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.olmoe import modeling_olmoe as olmoe


class Backbone(NamedTuple):
    """
    One kind of layers.

    Args:
        config_class: the Transformers configuration of the backbone, for its plan of tensor parallelism.
        layer, attention, rotary: modules of Transformers, all made from a configuration.
        norm: makes the norm after the last layer from a configuration.
        mlp: the dense MLP.
        moe: the sparse MLP, a router and its experts; `None` where the backbone has no experts.
        outputs: the modules of a layer whose weights scale what it adds to the state. Where all of them are zero, the
            layer leaves the state as it is.
        needs_experts: whether the backbone has no dense form.
        clips_qkv: whether queries, keys and values can be clipped (`clip_qkv`).
        has_mlp_bias: whether the linear maps of the dense MLP can have biases (`mlp_bias`).
        splits_hidden_size: whether `head_dim` has to be `hidden_size / num_attention_heads`.
    """

    config_class: type[PreTrainedConfig]
    layer: type[nn.Module]
    attention: type[nn.Module]
    rotary: type[nn.Module]
    norm: Callable[[PreTrainedConfig], nn.Module]
    mlp: type[nn.Module]
    moe: type[nn.Module] | None = None
    outputs: tuple[str, ...] = ("o_proj", "down_proj")
    needs_experts: bool = False
    clips_qkv: bool = False
    has_mlp_bias: bool = False
    splits_hidden_size: bool = False


BACKBONES = {
    # Pre-norm. Its experts are OLMoE's: with `norm_topk_prob` they compute what Mixtral's do.
    "llama": Backbone(
        config_class=LlamaConfig,
        layer=llama.LlamaDecoderLayer,
        attention=llama.LlamaAttention,
        rotary=llama.LlamaRotaryEmbedding,
        norm=lambda config: llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        mlp=llama.LlamaMLP,
        moe=olmoe.OlmoeSparseMoeBlock,
        has_mlp_bias=True,
    ),
    # Pre-norm; LayerNorm without weights, whose epsilon is always 1e-5.
    "olmo": Backbone(
        config_class=OlmoConfig,
        layer=olmo.OlmoDecoderLayer,
        attention=olmo.OlmoAttention,
        rotary=olmo.OlmoRotaryEmbedding,
        norm=lambda config: olmo.OlmoLayerNorm(config.hidden_size),
        mlp=olmo.OlmoMLP,
        clips_qkv=True,
    ),
    # Norms after attention and MLP; RMSNorm of whole queries and keys, all heads together.
    "olmo2": Backbone(
        config_class=Olmo2Config,
        layer=olmo2.Olmo2DecoderLayer,
        attention=olmo2.Olmo2Attention,
        rotary=olmo2.Olmo2RotaryEmbedding,
        norm=lambda config: olmo2.Olmo2RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        mlp=olmo2.Olmo2MLP,
        outputs=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    # Pre-norm; RMSNorm of whole queries and keys; experts.
    "olmoe": Backbone(
        config_class=OlmoeConfig,
        layer=olmoe.OlmoeDecoderLayer,
        attention=olmoe.OlmoeAttention,
        rotary=olmoe.OlmoeRotaryEmbedding,
        norm=lambda config: olmoe.OlmoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        mlp=olmoe.OlmoeMLP,
        moe=olmoe.OlmoeSparseMoeBlock,
        needs_experts=True,
        clips_qkv=True,
        splits_hidden_size=True,
    ),
}


# PyTorch's grouped product wants rows of a multiple of 16 bytes: 8 numbers in half precision.
EXPERT_ALIGNMENT = 8


def new_layer(layer_class: type[nn.Module], config: PreTrainedConfig, layer_idx: int, is_sparse: bool) -> nn.Module:
    """A layer of `layer_class`, the backbone's or a subclass, whose MLP is dense or sparse."""
    backbone = BACKBONES[config.backbone]
    mlp_class = backbone.moe if is_sparse else backbone.mlp
    layer = layer_class(config, layer_idx)
    if not isinstance(layer.mlp, mlp_class):
        layer.mlp = mlp_class(config)
    return layer


def tensor_parallel_plan(backbone: Backbone, is_sparse: bool) -> dict[str, str]:
    """How Transformers' tensor parallelism splits a stack of layers, by the names of their modules."""
    mlp_plan = (OlmoeConfig if is_sparse else LlamaConfig).base_model_tp_plan
    return {
        **{name: style for name, style in backbone.config_class.base_model_tp_plan.items() if ".self_attn." in name},
        **{name: style for name, style in mlp_plan.items() if ".mlp." in name},
    }


def expert_parallel_plan(backbone: Backbone, is_sparse: bool) -> dict[str, str]:
    """How Transformers' expert parallelism deals out the experts of a stack of layers."""
    return OlmoeConfig.base_model_ep_plan if is_sparse else {}
