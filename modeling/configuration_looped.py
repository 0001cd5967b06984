"""What the configurations of both looped models share: the Transformers fields, their checks, the derived visits."""

import math
from collections.abc import Callable
from dataclasses import fields

import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .backbones import BACKBONES, Backbone, expert_parallel_plan, tensor_parallel_plan

NO_ROUTERS = "False with num_experts=0: there are no routers"


def require(condition: bool, field: str, value, allowed: str) -> None:
    """Raise a `ValueError` that names the field, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{field}={value!r} is not allowed: it must be {allowed}.")


def is_positive_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def make_servable(class_name: str) -> None:
    """
    Have `transformers serve` find a class: it takes the name that a checkpoint gives for one in `transformers`, where
    it now finds the Auto class, which loads ours. Transformers imports itself twice, as two modules of one type, and
    the server may hold either: the name goes where both look.
    """
    setattr(type(transformers), class_name, AutoModelForCausalLM)


def backbones_with(feature: str) -> tuple[str, ...]:
    """The names of the backbones that have a feature: see [`Backbone`]."""
    return tuple(name for name, backbone in BACKBONES.items() if getattr(backbone, feature))


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
            Standard deviation of the token embeddings at initialisation. `None` stands for 0.3 in AsymLoop and 1.0 in
            Full Loop, or for `initializer_range` where the head shares the embeddings: see `docs/architecture.md`.
        backbone (`str`, *optional*, defaults to `"llama"`):
            The kind of the layers: `"llama"`; `"olmo"`, norms without weights; `"olmo2"`, norms after attention and
            MLP, normalised queries and keys; `"olmoe"`, normalised queries and keys, experts.
        clip_qkv (`float`, *optional*):
            The largest absolute value of queries, keys and values; for `"olmo"` and `"olmoe"`.
        num_experts (`int`, *optional*, defaults to 0):
            Experts of each sparse MLP, of `intermediate_size` each; 0 for dense MLPs. For `"llama"` and `"olmoe"`.
        num_experts_per_tok (`int`, *optional*, defaults to 2):
            Experts that a router picks for a token.
        norm_topk_prob (`bool`, *optional*, defaults to `False`):
            Whether the weights of the picked experts are made to sum to one, as in Mixtral.
        router_aux_loss_coef (`float`, *optional*, defaults to 0.01):
            Factor of the load-balancing loss, which counts every visit, in the loss; 0 without experts.
        output_router_logits (`bool`, *optional*, defaults to `False`):
            Whether the router logits are returned and the load-balancing loss is added to the loss.

    Raises:
        `ValueError`: a value out of range; the message names the field, the value and what is allowed.
    """

    # What follows from the fields; a value given for one must be the one that follows.
    _derived = ("num_hidden_layers",)
    attribute_map = {"num_local_experts": "num_experts"}
    _untied_embedding_std = 1.0
    _fields_of_the_other = ()  # which Transformers would take without a word
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
    backbone: str = "llama"
    clip_qkv: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.01
    output_router_logits: bool = False

    def __post_init__(self, **kwargs):
        for name in self._fields_of_the_other:
            require(name not in kwargs, name, kwargs.get(name), f"left out: {type(self).__name__} has no such field")
        for alias, name in self.attribute_map.items():
            self._take_alias(alias, name, kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._check_sizes()
        if self.head_dim is None:
            self._check_head_split()
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.validate_architecture()
        if self.num_experts == 0:
            self.router_aux_loss_coef = 0.0  # by which TRL tells that there is no such loss
        for name in self._derived:
            if name in kwargs:
                value, derived = kwargs.pop(name), getattr(self, name)
                require(value == derived, name, value, f"{derived!r}, which follows from the other fields")
        super().__post_init__(**kwargs)
        rope_type, allowed = self.rope_parameters.get("rope_type"), ("default", *ROPE_INIT_FUNCTIONS)
        require(rope_type in allowed, "rope_parameters['rope_type']", rope_type, f"one of {allowed}")

    def _take_alias(self, alias: str, name: str, kwargs: dict) -> None:
        """Set a field that is given under another name, before the fields are checked."""
        if alias in kwargs:
            value, default = kwargs.pop(alias), getattr(type(self), name)
            given = getattr(self, name)
            require(given in (default, value), alias, value, f"{name}={given!r}, or one of the two left out")
            setattr(self, name, value)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in Transformers, but fields given in `kwargs` are checked together with those of the dictionary."""
        names = {field.name for field in fields(cls)} - {"dtype"}  # which may be "auto"
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

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism splits the base model, by the names of its modules."""
        return {**self._plan(tensor_parallel_plan), **self.__dict__.get("base_model_tp_plan", {})}

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        """Transformers 5.18 adds the embeddings of a tied model."""
        self.__dict__["base_model_tp_plan"] = plan

    @property
    def base_model_ep_plan(self) -> dict[str, str] | None:
        """How expert parallelism deals out the experts of the base model."""
        return self._plan(expert_parallel_plan) or None

    def _plan(self, plan_of_stack: Callable[[Backbone, bool], dict[str, str]]) -> dict[str, str]:
        """A plan for the modules of the base model, from that of a stack of layers."""
        return {
            f"{prefix}{name}": style
            for prefix, is_sparse in self._stacks().items()
            for name, style in plan_of_stack(BACKBONES[self.backbone], is_sparse).items()
        }

    def _stacks(self) -> dict[str, bool]:
        """Whether each stack of layers is sparse, by what its name begins with in the base model."""
        return {"": self.num_experts > 0}

    def _check_backbone(self) -> None:
        name, clip = self.backbone, self.clip_qkv
        require(name in tuple(BACKBONES), "backbone", name, f"one of {tuple(BACKBONES)}")
        require(clip is None or (is_number(clip) and clip > 0), "clip_qkv", clip, "None or a number above 0")
        clips = backbones_with("clips_qkv")
        require(clip is None or name in clips, "clip_qkv", clip, f"None with backbone={name!r}; {clips} can clip")
        biases = backbones_with("has_mlp_bias")
        require(
            self.mlp_bias is False or (name in biases and not self.num_experts),
            "mlp_bias",
            self.mlp_bias,
            f"False with backbone={name!r} and num_experts={self.num_experts}; dense MLPs of {biases} can have biases",
        )
        require(
            not BACKBONES[name].splits_hidden_size or self.head_dim * self.num_attention_heads == self.hidden_size,
            "head_dim",
            self.head_dim,
            f"hidden_size / num_attention_heads = {self.hidden_size / self.num_attention_heads:g} with "
            f"backbone={name!r}",
        )

    def _check_experts(self) -> None:
        count, per_token = self.num_experts, self.num_experts_per_tok
        require(type(count) is int and count >= 0, "num_experts", count, "an integer of at least 0")
        sparse = backbones_with("moe")
        needs = BACKBONES[self.backbone].needs_experts
        require(
            not count or self.backbone in sparse, "num_experts", count, f"0 with a backbone that is not of {sparse}"
        )
        require(count or not needs, "num_experts", count, f"a positive integer with backbone={self.backbone!r}")
        require(is_positive_int(per_token), "num_experts_per_tok", per_token, "a positive integer")
        require(not count or per_token <= count, "num_experts_per_tok", per_token, f"at most num_experts={count}")
        coefficient = self.router_aux_loss_coef
        require(is_number(coefficient) and coefficient >= 0, "router_aux_loss_coef", coefficient, "at least 0")
        wanted = self.output_router_logits
        require(count or not wanted, "output_router_logits", wanted, NO_ROUTERS)

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
        flags = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache")
        for field in (*flags, "norm_topk_prob", "output_router_logits"):
            require(isinstance(getattr(self, field), bool), field, getattr(self, field), "True or False")
        self._check_backbone()
        self._check_experts()
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
