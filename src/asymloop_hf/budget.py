"""The budget of a model and of its matched partner: parameters, depth, FLOPs and cache bytes per token."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeTopKRouter

from .modeling import AsymLoopConfig, FullLoopConfig
from .modeling.configuration_asymloop import PRESETS

EXAMPLE_WINDOW = 16


@dataclass
class Budget:
    """
    What a token costs.

    Args:
        parameters: all of them; tied weights count once.
        embedding_parameters: those of the token embeddings and of the head.
        active_parameters: those that a token passes; fewer where there are experts.
        effective_depth: visits, the layers that a token passes.
        flops_per_token: forward pass of one token that has `context` tokens before and with it; a multiplication and
            an addition count as two. Training takes three times as many.
        kv_bytes_per_token: cache of a sequence of `context` tokens, divided by `context`.
        kv_bytes_per_token_last_loop: the same with `local_kv="last_loop"`; `None` for Full Loop.
        kv_bytes_per_token_windowed: the same with `local_window` set: to 16 if the model has no window; `None` for
            Full Loop.
    """

    parameters: int
    embedding_parameters: int
    active_parameters: int
    effective_depth: int
    flops_per_token: int
    kv_bytes_per_token: float
    kv_bytes_per_token_last_loop: float | None = None
    kv_bytes_per_token_windowed: float | None = None


def budget(config: AsymLoopConfig | FullLoopConfig, context: int | None = None, dtype=torch.bfloat16) -> Budget:
    """
    The budget of the model that `config` describes; no weights are made.

    Args:
        context: tokens in the sequence, `config.max_position_embeddings` by default.
        dtype: of the cache.

    Raises:
        `ValueError`: `context` is not positive, or the model is of another kind.
    """
    context = config.max_position_embeddings if context is None else context
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"context={context} is not allowed: it must be a positive integer.")
    if not isinstance(config, (AsymLoopConfig, FullLoopConfig)):
        raise ValueError(f"model_type={config.model_type!r} is not allowed: it must be 'asymloop' or 'fullloop'.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    costs = Budget(
        parameters=model.num_parameters(),
        embedding_parameters=sum(weight.numel() for weight in embeddings),
        active_parameters=model.num_parameters() - sum(map(_idle_parameters, model.modules())),
        effective_depth=config.num_hidden_layers,
        flops_per_token=_flops(model, context),
        kv_bytes_per_token=_kv_bytes(config, context, dtype),
    )
    if isinstance(config, FullLoopConfig):
        return costs
    window = config.local_window or EXAMPLE_WINDOW
    return replace(
        costs,
        kv_bytes_per_token_last_loop=_kv_bytes(config, context, dtype, kept_loops=1),
        kv_bytes_per_token_windowed=_kv_bytes(config, context, dtype, window=window),
    )


def _flops(model: nn.Module, context: int) -> int:
    config = model.config
    linear = sum(loops * _linear_flops(stack) for stack, loops in _stacks(model)) + _linear_flops(model.lm_head)
    return linear + 4 * _attended_keys(config, context) * config.num_attention_heads * config.head_dim


def _stacks(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The stacks of layers, each with the times that it runs."""
    if isinstance(model.config, FullLoopConfig):
        return [(model.model.layers, model.config.num_loops)]
    return [(model.model.encoder, 1), (model.model.decoder, model.config.num_loops)]


def _linear_flops(module: nn.Module) -> int:
    return sum(2 * _multiplied_parameters(part) for part in module.modules())


def _multiplied_parameters(module: nn.Module) -> int:
    """The parameters of a linear map, a router or some experts that multiply the state of a token."""
    if isinstance(module, (nn.Linear, OlmoeTopKRouter)):
        return module.weight.numel()
    if isinstance(module, OlmoeExperts):
        return _expert_parameters(module) - _idle_parameters(module)
    return 0


def _idle_parameters(module: nn.Module) -> int:
    """The parameters of the experts that a token does not pass."""
    if not isinstance(module, OlmoeExperts):
        return 0
    num_idle = module.num_experts - module.config.num_experts_per_tok
    return _expert_parameters(module) // module.num_experts * num_idle


def _expert_parameters(experts: OlmoeExperts) -> int:
    return sum(weight.numel() for weight in experts.parameters())


def _attended_keys(config: AsymLoopConfig | FullLoopConfig, context: int) -> int:
    """The keys that the last of `context` tokens reads in all its visits, in the decoder global and local ones."""
    if isinstance(config, FullLoopConfig):
        return config.num_hidden_layers * context
    decoder_visits = config.num_loops * config.num_decoder_layers
    local = min(context, config.local_window or context)
    return config.num_encoder_layers * context + decoder_visits * (context + local)


def _kv_bytes(
    config: AsymLoopConfig | FullLoopConfig,
    context: int,
    dtype: torch.dtype,
    kept_loops: int | None = None,
    window: int | None = None,
) -> float:
    slot_bytes = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    if isinstance(config, FullLoopConfig):
        return config.num_hidden_layers * slot_bytes
    window = window or config.local_window
    kept_positions = context if window is None else min(context, window - 1)
    local_slots = (kept_loops or config.num_loops) * config.num_decoder_layers
    return slot_bytes * (config.num_encoder_layers + local_slots * kept_positions / context)


def load_config(name: str, backbone: str | None = None) -> AsymLoopConfig | FullLoopConfig:
    """
    The configuration behind a preset's name, a folder or a name on the hub.

    Args:
        backbone: of a preset, `"llama"` by default.

    Raises:
        `FileNotFoundError`: it is none of these.
        `ValueError`: the configuration of another kind of model, or a backbone that is unknown or for a checkpoint.
    """
    if name in PRESETS:
        return AsymLoopConfig.preset(name, "llama" if backbone is None else backbone)
    if backbone is not None:
        raise ValueError(f"backbone={backbone!r} is not allowed with a checkpoint, which has its own: name a preset.")
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        presets = ", ".join(PRESETS)
        raise FileNotFoundError(
            f"{name!r} is neither a preset ({presets}) nor a folder or hub name with a readable config.json: {error}"
        ) from error
    return config


def matched_budgets(config: AsymLoopConfig | FullLoopConfig, context: int | None = None) -> dict[str, Budget]:
    """The budget of a model and, where there is one, that of its matched Full Loop, by model type."""
    budgets = {config.model_type: budget(config, context)}
    if isinstance(config, AsymLoopConfig):
        with suppress(ValueError):  # no whole number of loops matches
            budgets[FullLoopConfig.model_type] = budget(config.matched_full_loop(), context)
    return budgets


def format_table(budgets: dict[str, Budget], context: int, window: int) -> str:
    """The budgets side by side, as text."""
    labels = {
        "parameters": "parameters",
        "embedding_parameters": "  of these embeddings and head",
        "active_parameters": "  of these active in a token",
        "effective_depth": "effective depth (visits)",
        "flops_per_token": f"forward FLOPs per token at {context} tokens",
        "kv_bytes_per_token": "KV bytes per token (bfloat16)",
        "kv_bytes_per_token_last_loop": '  with local_kv="last_loop"',
        "kv_bytes_per_token_windowed": f"  with local_window={window}",
    }
    columns = {name: asdict(costs) for name, costs in budgets.items()}
    rows = [("", *columns)]
    for field, label in labels.items():
        values = [column[field] for column in columns.values()]
        rows.append((label, *("-" if value is None else f"{value:,.0f}" for value in values)))
    return "\n".join(f"{label:<40}" + "".join(f"{value:>20}" for value in values) for label, *values in rows)
