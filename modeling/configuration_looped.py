"""What the configurations of both looped models share: the Transformers fields, their checks, the derived visits."""

import math
from dataclasses import fields

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def require(condition: bool, field: str, value, allowed: str) -> None:
    """Raise a `ValueError` that names the field, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{field}={value!r} is not allowed: it must be {allowed}.")


def is_positive_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class LoopedConfig(PreTrainedConfig):
    """
    The fields that `AsymLoopConfig` and `FullLoopConfig` share; those not described here mean what they mean in
    [`~transformers.LlamaConfig`].

    Args:
        num_loops (`int`, *optional*, defaults to 2):
            How often the weight-tied layers run on the sequence. `forward` and `generate` take another count.
        input_injection (`str`, *optional*, defaults to `"embedding"`):
            What is added to the state before a loop; see the subclass.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the weight matrices at initialisation.
        embedding_initializer_range (`float`, *optional*):
            Standard deviation of the token embeddings at initialisation. `None` stands for 1.0, or for
            `initializer_range` where the head shares the embeddings: see `docs/architecture.md`.

    Raises:
        `ValueError`: a value out of range; the message names the field, the value and what is allowed.
    """

    # What follows from the fields; a value given for one must be the one that follows.
    _derived = ("num_hidden_layers",)
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    num_loops: int = 2
    input_injection: str = "embedding"

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._check_sizes()
        if self.head_dim is None:
            self._check_head_split()
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.validate_architecture()
        for name in self._derived:
            if name in kwargs:
                value, derived = kwargs.pop(name), getattr(self, name)
                require(value == derived, name, value, f"{derived!r}, which follows from the other fields")
        super().__post_init__(**kwargs)
        self._check_what_is_to_come()
        rope_type, allowed = self.rope_parameters.get("rope_type"), ("default", *ROPE_INIT_FUNCTIONS)
        require(rope_type in allowed, "rope_parameters['rope_type']", rope_type, f"one of {allowed}")

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in Transformers, but fields given in `kwargs` are checked together with those of the dictionary."""
        names = {field.name for field in fields(cls)}
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        return super().from_dict({**config_dict, **given}, **kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """The visits of a token, derived from the layers and loops: one cache slot each."""
        return self._num_visits()

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        derived_from = ", ".join(f"{name}={getattr(self, name)}" for name in (*self._layer_counts, "num_loops"))
        require(
            value == self.num_hidden_layers,
            "num_hidden_layers",
            value,
            f"{self.num_hidden_layers}, the visits that follow from {derived_from}; change those instead",
        )

    def _check_sizes(self) -> None:
        positive = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("max_position_embeddings", "num_loops", *self._layer_counts),
        )
        for field in positive:
            require(is_positive_int(getattr(self, field)), field, getattr(self, field), "a positive integer")

    def _check_what_is_to_come(self) -> None:
        for name, only in (("backbone", "llama"), ("num_experts", 0)):
            value = getattr(self, name, only)
            require(value == only, name, value, f"{only!r}, the only one that there is so far")

    def _check_numbers(self) -> None:
        dropout = self.attention_dropout
        require(is_number(dropout) and 0 <= dropout < 1, "attention_dropout", dropout, "at least 0 and below 1")
        for field in ("initializer_range", "embedding_initializer_range", "rms_norm_eps"):
            value = getattr(self, field)
            optional = field == "embedding_initializer_range" and value is None
            require(optional or (is_number(value) and value > 0), field, value, "a number above 0")

    def _check_head_split(self) -> None:
        require(
            self.hidden_size % self.num_attention_heads == 0,
            "num_attention_heads",
            self.num_attention_heads,
            f"a divisor of hidden_size={self.hidden_size}, or head_dim must be given",
        )

    def validate_architecture(self) -> None:
        """Check every field; called when the configuration is made and again when a model is made from it."""
        self._check_sizes()
        self._check_what_is_to_come()
        require(
            is_positive_int(self.head_dim) and self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            "a positive even integer (rotary positions turn pairs of channels)",
        )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self._check_numbers()
        for field in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"):
            require(isinstance(getattr(self, field), bool), field, getattr(self, field), "True or False")
        require(
            self.rope_parameters is None or isinstance(self.rope_parameters, dict),
            "rope_parameters",
            self.rope_parameters,
            "None or a dictionary",
        )
        require(self.hidden_act in ACT2FN, "hidden_act", self.hidden_act, f"one of {tuple(ACT2FN)}")
        require(
            self.pad_token_id is None
            or (isinstance(self.pad_token_id, int) and -1 < self.pad_token_id < self.vocab_size),
            "pad_token_id",
            self.pad_token_id,
            f"None or from 0 to {self.vocab_size - 1}, as vocab_size={self.vocab_size}",
        )
        allowed = self._input_injections
        require(self.input_injection in allowed, "input_injection", self.input_injection, f"one of {allowed}")
