"""An AsymLoop that starts from a trained model of another kind: its layers become encoder and decoder layers."""

import copy
import os
import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from .backbones import BACKBONES
from .configuration_asymloop import AsymLoopConfig
from .configuration_looped import LoopedConfig, is_positive_int, require

logger = logging.get_logger(__name__)

# The models to start from, by `model_type`, with what their configurations leave unsaid.
DENSE_MODELS = {
    "llama": {"backbone": "llama"},
    "mistral": {"backbone": "llama"},
    "qwen2": {"backbone": "llama", "attention_bias": True},
    "mixtral": {"backbone": "llama", "norm_topk_prob": True},
    "olmo": {"backbone": "olmo"},
    "olmo2": {"backbone": "olmo2"},
    "olmoe": {"backbone": "olmoe"},
}
LAYER = re.compile(r"^model\.(?:(encoder|decoder)\.)?layers\.(\d+)\.")


def load_dense(model_or_path: PreTrainedModel | str | os.PathLike) -> PreTrainedModel:
    """
    The model, loaded in its own dtype where a path is given.

    Raises:
        `ValueError`: a kind of model that no backbone has the layers of, one with a sliding window, or a checkpoint
            that lacks weights of a causal language model.
    """
    is_loaded = isinstance(model_or_path, PreTrainedModel)
    is_path = isinstance(model_or_path, (str, os.PathLike))
    kind = type(model_or_path).__name__
    require(is_loaded or is_path, "model_or_path", kind, "a model, or the folder or hub name of one")
    config = model_or_path.config if is_loaded else AutoConfig.from_pretrained(model_or_path)
    require(config.model_type in DENSE_MODELS, "model_type", config.model_type, f"one of {tuple(DENSE_MODELS)}")
    window = getattr(config, "sliding_window", None)
    require(window is None, "sliding_window", window, "None in the dense model: the encoder attends to everything")
    if not is_loaded:
        return load_whole(model_or_path)
    is_causal_lm = hasattr(model_or_path, "lm_head") and hasattr(model_or_path, "model")
    require(is_causal_lm, "model_or_path", kind, "a causal language model")
    return model_or_path


def load_whole(path: str | os.PathLike) -> PreTrainedModel:
    """The causal language model of a checkpoint that has all of its weights, and no others."""
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys"):
        require(not info[kind], kind, sorted(info[kind]), f"none in a checkpoint of a {type(model).__name__}")
    return model


def config_from_dense(dense_config, **fields) -> AsymLoopConfig:
    """The configuration whose layers are those of the dense model; `fields` are those of `AsymLoopConfig`."""
    names = [name for name in LoopedConfig.__annotations__ if hasattr(dense_config, name)]
    shared = {name: copy.deepcopy(getattr(dense_config, name)) for name in names}
    shared |= DENSE_MODELS[dense_config.model_type]
    allowed = {*LoopedConfig.__annotations__, *AsymLoopConfig.__annotations__} - {"backbone"}
    for name, value in fields.items():
        require(name in allowed, name, value, f"left out: it is not one of {sorted(allowed)}")
    tied = fields.get("tie_word_embeddings", shared["tie_word_embeddings"])
    has_one = shared["tie_word_embeddings"] or tied is not True
    require(has_one, "tie_word_embeddings", tied, "False: the head of the dense model is not its embeddings")
    return AsymLoopConfig(**shared | fields)


def choose_layers(
    field: str, chosen: Sequence[int] | None, num_layers: int | None, num_dense: int, from_end: bool
) -> list[int]:
    """
    The dense layers that the layers of a stack are copied from.

    Args:
        chosen: one for each layer of the stack; by default the first `num_layers`, or the last ones.
        num_layers: of the stack; by default as many as are chosen, or half of the dense ones.
    """
    is_sequence = chosen is None or (isinstance(chosen, Sequence) and not isinstance(chosen, str) and len(chosen) > 0)
    require(
        is_sequence, f"{field}_from", chosen, f"a list of layers of the dense model, each from 0 to {num_dense - 1}"
    )
    if num_layers is None:
        num_layers = max(1, num_dense // 2) if chosen is None else len(chosen)
    require(is_positive_int(num_layers), f"num_{field}_layers", num_layers, "a positive integer")
    if chosen is None:
        allowed = f"at most the {num_dense} layers of the dense model, or {field}_from must be given"
        require(num_layers <= num_dense, f"num_{field}_layers", num_layers, allowed)
        return list(range(num_dense - num_layers, num_dense) if from_end else range(num_layers))
    in_range = [type(layer) is int and 0 <= layer < num_dense for layer in chosen]
    allowed = f"{num_layers} layers of the dense model, each from 0 to {num_dense - 1}"
    require(len(chosen) == num_layers and all(in_range), f"{field}_from", chosen, allowed)
    return list(chosen)


def dense_name(name: str, layers_from: dict[str, list[int]]) -> str:
    """The name in the dense model of a weight of ours."""
    match = LAYER.match(name)
    if match is None:
        return name
    stack, layer = match.groups()
    return f"model.layers.{layers_from[stack][int(layer)]}.{name[match.end() :]}"


@torch.no_grad()
def copy_weights(model: nn.Module, dense: nn.Module, layers_from: dict[str, list[int]]) -> dict:
    """
    Copy what the two have in common.

    Returns:
        `"copied"`, our weights with the dense ones that they come from; `"dropped"`, the dense ones that went nowhere;
        and `"new"`, ours that come from nowhere.

    Raises:
        `ValueError`: two weights of one name have different shapes.
    """
    theirs, copied, new = dense.state_dict(), {}, []
    for name, weight in model.state_dict().items():
        source = dense_name(name, layers_from)
        if source not in theirs:
            new.append(name)
            continue
        shape = tuple(theirs[source].shape)
        require(shape == tuple(weight.shape), f"{source}.shape", shape, f"{tuple(weight.shape)}, as of {name}")
        weight.copy_(theirs[source])
        copied[name] = source
    return {"copied": copied, "dropped": sorted(set(theirs) - set(copied.values())), "new": new}


@torch.no_grad()
def silence_decoder(model: nn.Module) -> None:
    """Set to zero what scales the output of each decoder layer, so that the decoder leaves the state as it is."""
    outputs = BACKBONES[model.config.backbone].outputs
    for name, weight in model.model.decoder.named_parameters():
        if any(part in outputs for part in name.split(".")):
            weight.zero_()


def summary(info: dict, layers_from: dict[str, list[int]]) -> str:
    """What was copied, dropped and made new, in a few words."""
    other = sorted({name for name in info["copied"].values() if LAYER.match(name) is None})
    dropped_layers = {LAYER.match(name)[2] for name in info["dropped"] if LAYER.match(name)}
    used_layers = {str(layer) for layers in layers_from.values() for layer in layers}
    whole = sorted(map(int, dropped_layers - used_layers))
    parts = [name for name in info["dropped"] if not LAYER.match(name) or LAYER.match(name)[2] in used_layers]
    dropped = [f"layer {layer}" for layer in whole] + kinds(parts)
    return (
        f"copied: encoder layers from {layers_from['encoder']}, decoder layers from {layers_from['decoder']}, "
        f"{', '.join(other)}; dropped: {', '.join(dropped) or 'nothing'}; "
        f"new: {', '.join(kinds(info['new'])) or 'nothing'}"
    )


def kinds(names: list[str]) -> list[str]:
    """The names with a star in the place of the number of a layer, each once."""
    return sorted({re.sub(r"\.layers\.\d+\.", ".layers.*.", name) for name in names})


def from_dense(
    model_class: type[PreTrainedModel],
    model_or_path: PreTrainedModel | str | os.PathLike,
    num_encoder_layers: int | None,
    num_decoder_layers: int | None,
    encoder_from: Sequence[int] | None,
    decoder_from: Sequence[int] | None,
    silent_decoder: bool,
    **fields,
) -> tuple[PreTrainedModel, dict]:
    """The model and what was copied, dropped and made new: see [`AsymLoopForCausalLM.from_dense`]."""
    require(isinstance(silent_decoder, bool), "silent_decoder", silent_decoder, "True or False")
    dense = load_dense(model_or_path)
    num_dense = dense.config.num_hidden_layers
    layers_from = {
        "encoder": choose_layers("encoder", encoder_from, num_encoder_layers, num_dense, from_end=False),
        "decoder": choose_layers("decoder", decoder_from, num_decoder_layers, num_dense, from_end=True),
    }
    sizes = {f"num_{stack}_layers": len(layers) for stack, layers in layers_from.items()}
    config = config_from_dense(dense.config, **sizes, **fields)
    model = model_class._from_config(config, dtype=dense.dtype).to(dense.device).eval()
    info = copy_weights(model, dense, layers_from)
    if silent_decoder:
        silence_decoder(model)
    model.generation_config = copy.deepcopy(dense.generation_config)
    logger.warning(f"{model_class.__name__}.from_dense: {summary(info, layers_from)}")
    return model, info
