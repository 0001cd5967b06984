"""Models by name, for comparisons: `full_loop`, `asymloop+llr`, `asymloop+window=16+num_loops=5`."""

import ast
from dataclasses import dataclass, field, fields

from transformers import PreTrainedConfig

from .modeling import AsymLoopConfig, FullLoopConfig
from .sizes import Size

KINDS = ("asymloop", "full_loop", "llama")
LAYERWISE_LR = "llr"
WINDOW = "window"  # short for local_window, of 16 unless a number is given
DEFAULT_WINDOW = 16
# By all models of a comparison, as they read the same data.
SHARED = {"vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True)
class ModelVariant:
    """
    A model of a comparison.

    Args:
        name: as it was written.
        kind: `"asymloop"`; `"full_loop"`, with the same parameters and effective depth; `"llama"`, not looped, a layer
            for each visit.
        layerwise_lr: whether it is trained with layerwise learning rates.
        fields: of its configuration, in place of those of the size.
    """

    name: str
    kind: str
    layerwise_lr: bool = False
    fields: dict = field(default_factory=dict)

    def config(self, size: Size, tokenizer=None) -> AsymLoopConfig | FullLoopConfig:
        """
        The configuration at a size, with the vocabulary of a tokenizer if there is one.

        Raises:
            `ValueError`: a field has a value that is not allowed; the message names it.
        """
        shape = size.shared_fields(tokenizer)
        num_layers = 2 * size.num_stack_layers
        num_visits = size.num_stack_layers * (1 + size.num_loops)
        if self.kind == "asymloop":
            stacks = {"num_encoder_layers": size.num_stack_layers, "num_decoder_layers": size.num_stack_layers}
            return AsymLoopConfig(**shape | stacks | {"num_loops": size.num_loops} | self.fields)
        if self.kind == "full_loop":
            loops = {"num_layers": num_layers, "num_loops": num_visits // num_layers}
            return FullLoopConfig(**shape | loops | self.fields)
        return FullLoopConfig(**shape | {"num_layers": num_visits, "num_loops": 1} | self.fields)


def parse_variant(name: str) -> ModelVariant:
    """
    The model of a name `KIND[+llr][+window[=W]][+FIELD=VALUE]...`, with any fields of the configuration.

    Raises:
        `ValueError`: an unknown kind, part or field, or a part given twice; the message names it and what is allowed.
    """
    kind, *parts = name.split("+")
    if kind not in KINDS:
        raise ValueError(f"models: {name!r} is not allowed: it must start with one of {', '.join(KINDS)}.")
    config_class = AsymLoopConfig if kind == "asymloop" else FullLoopConfig
    known = (
        {field.name for field in fields(config_class)} - {field.name for field in fields(PreTrainedConfig)} - SHARED
    )
    layerwise_lr, values = False, {}
    for part in parts:
        key, has_value, text = part.partition("=")
        if part == LAYERWISE_LR and not layerwise_lr:
            layerwise_lr = True
            continue
        if key == WINDOW:
            key, text = "local_window", text if has_value else str(DEFAULT_WINDOW)
        if key not in known or key in values or not text:
            window = f", {WINDOW}[=WIDTH]" if "local_window" in known else ""
            raise ValueError(
                f"models: {part!r} in {name!r} is not allowed: it must be {LAYERWISE_LR}{window} or FIELD=VALUE, once "
                f"each, with a field of {config_class.__name__} that is of the model, not of the data: "
                f"{', '.join(sorted(known))}."
            )
        values[key] = _literal(text)
    return ModelVariant(name, kind, layerwise_lr, values)


def _literal(text: str):
    """A Python literal, or the text itself: `none` for `input_injection=none`."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
