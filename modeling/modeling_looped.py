"""What both looped models share: initialisation, saving, the checks of their inputs, the language-model head."""

import copy
from collections.abc import Callable
from dataclasses import fields
from functools import wraps

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, QuantizedCache, QuantizedLayer
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import AutoModel
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeTopKRouter
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import OutputRecorder

from .backbones import BACKBONES, EXPERT_ALIGNMENT
from .configuration_looped import NO_ROUTERS, is_positive_int, require
from .load_balancing import load_balancing_loss

try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:  # Transformers before 5.21

    def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """The states whose logits are wanted: the last `logits_to_keep` (0 for all), or those at the given indices."""
        return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]


# Transformers renamed the cache argument and output from `past_key_values` to `cache` in 5.24.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


# Transformers 5.18 silently leaves the quantized part of a cache as it is, and gives a wrong result.
QUANTIZED_CAN_BE_REORDERED = QuantizedLayer.reorder_cache is not DynamicLayer.reorder_cache
QUANTIZED_REFUSES_TO_BE_CUT = not QuantizedLayer.is_croppable


def takes_old_cache_name(forward: Callable) -> Callable:
    """Warn of `past_key_values` where Transformers' own models do, but drop neither of two different caches."""
    if CACHE_NAME != "cache":
        return forward
    renamed = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)

    @wraps(forward)
    def checked(*args, **kwargs):
        if "cache" in kwargs and "past_key_values" in kwargs:
            kwargs["cache"] = one_cache(kwargs["cache"], kwargs.pop("past_key_values"))
        return renamed(*args, **kwargs)

    return checked


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache under whichever of its two names it was passed."""
    same = cache is None or past_key_values is None or cache is past_key_values
    require(same, "past_key_values", type(past_key_values).__name__, "None, or the same, where `cache` is given")
    cache = past_key_values if cache is None else cache
    check_kind(cache)
    return cache


def check_kind(cache: Cache | None) -> None:
    """Raise a `ValueError` if `cache` is not one of a decoder alone."""
    is_cache = isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache)
    require(cache is None or is_cache, "cache", type(cache).__name__, "a Transformers `Cache` of a decoder or None")


def embed(model: PreTrainedModel, input_ids: torch.LongTensor | None, inputs_embeds: torch.Tensor | None):
    """The token embeddings, of shape `(batch, length, hidden_size)`."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
    return model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds


def check_num_slots(cache: Cache | None, *allowed: int) -> None:
    """Raise a `ValueError` if `cache` was made for another number of layers or loops; an empty one fits any."""
    num_slots = len(cache.layers) if cache is not None else 0
    counts = " or ".join(map(str, allowed))
    require(num_slots in (0, *allowed), "cache", cache, f"made for {counts} visits (it has {num_slots} slots)")


def check_shape(name: str, tensor: torch.Tensor, *allowed: tuple[int, ...]) -> None:
    """Raise a `ValueError` if a tensor has none of these shapes. A message made before would fix them in an export."""
    shape = tuple(tensor.shape)
    if shape not in allowed:
        require(False, f"{name}.shape", shape, " or ".join(map(str, allowed)))


def check_padding(attention_mask: torch.Tensor | None, inputs_embeds: torch.Tensor, cache: Cache | None) -> None:
    """Raise a `ValueError` if a padding mask does not have one column for each cached and each new position."""
    is_static = cache is not None and cache.is_compileable  # its length is a tensor, which a check would wait for
    if attention_mask is not None and not is_static:
        past = cache.get_seq_length() if cache is not None else 0
        check_shape("attention_mask", attention_mask, (inputs_embeds.shape[0], past + inputs_embeds.shape[1]))


def check_position_ids(position_ids: torch.LongTensor, inputs_embeds: torch.Tensor) -> None:
    """Raise a `ValueError` if there is not one position for each token."""
    batch, length = inputs_embeds.shape[:2]
    check_shape("position_ids", position_ids, (batch, length), (1, length))


def next_position_ids(inputs_embeds: torch.Tensor, cache: Cache | None) -> torch.LongTensor:
    """Positions of shape `(1, length)` that go on where the cache ends."""
    past = cache.get_seq_length() if cache is not None else 0
    return (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past).unsqueeze(0)


# The modules that the language-model, classification and question-answering classes put on the base model.
HEADS = ("lm_head", "score", "qa_outputs")


class LoopedPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": GradientCheckpointingLayer,  # what every layer is
        "attentions": [backbone.attention for backbone in BACKBONES.values()],
        "router_logits": OutputRecorder(OlmoeTopKRouter, index=0),
    }

    def __init__(self, config, *args, **kwargs):
        config.validate_architecture()
        # Transformers' generic heads make their base model with `AutoModel.from_config`. From the files beside a
        # checkpoint Transformers loads configuration and model apart, so the class to register is that of `config`.
        AutoModel.register(type(config), self._base_model_class, exist_ok=True)
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """As in Transformers; FSDP2 shards by these names, and stops at one that the model has no layer of."""
        super().post_init()
        self._no_split_modules &= {type(module).__name__ for module in self.modules()}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self._embedding_std())
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, OlmoeExperts):
            init.normal_(module.gate_up_proj, std=self.config.initializer_range)
            init.normal_(module.down_proj, std=self.config.initializer_range)
        elif isinstance(module, OlmoeTopKRouter):
            init.normal_(module.weight, std=self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Transformers looks for its experts in the source of a model; ours come from its own modules."""
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """As in Transformers, but the default is eager where the grouped product cannot take experts of that size."""
        sizes = (self.config.hidden_size, self.config.intermediate_size)
        if requested_experts is None and any(size % EXPERT_ALIGNMENT for size in sizes):
            requested_experts = "eager"
        return super().get_correct_experts_implementation(requested_experts)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, *args, **kwargs):
        """As in Transformers, whose pipelines visit each layer once."""
        size = getattr(distributed_config, "pp_size", None) or 1
        require(size == 1, "pp_size", size, "1: a pipeline of Transformers would visit each layer once")
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)

    def _embedding_std(self) -> float:
        if self.config.embedding_initializer_range is not None:
            return self.config.embedding_initializer_range
        return self.config.initializer_range if self.config.tie_word_embeddings else self.config._untied_embedding_std

    def save_pretrained(self, *args, **kwargs):
        """As in Transformers; the modeling files are saved too, and every head can be loaded from them."""
        self.config.auto_map = dict(self._auto_map)
        return super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """
        As in Transformers, but weights that are missing or left over are an error, except those of a head that the
        checkpoint does not share with this class. `output_loading_info=True` returns their names instead.

        Raises:
            `ValueError`: names the weights.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return model, info
        if pretrained_model_name_or_path is None:  # the caller's own `state_dict`
            return model
        same_head = cls.__name__ in (model.config.architectures or [])
        for kind in ("missing", "unexpected"):
            keys = [key for key in sorted(info[f"{kind}_keys"]) if same_head or key.split(".")[0] not in HEADS]
            if keys:
                raise ValueError(
                    f"{pretrained_model_name_or_path!r} does not fit {cls.__name__}: {kind} weights {keys}."
                )
        return model


class LoopedCausalLM:
    """The causal language model on top of a looped model; subclasses add it to their base class."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _output_class = MoeCausalLMOutputWithPast
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config):
        super().__init__(config)
        self.model = self._base_model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_old_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_loops: int | None = None,
        past_key_values: Cache | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeCausalLMOutputWithPast:
        """
        Args (those of `LlamaForCausalLM`, and):
            num_loops: loops to run, more or fewer than `config.num_loops`; with a cache, those it was made for.
            past_key_values: another name of `cache`, for Transformers before 5.24.
            output_router_logits: return the router logits of each visit of a sparse layer and the load-balancing loss,
                and add the latter to the loss; by default `config.output_router_logits`.

        Returns:
            The loss (with `labels`), logits of shape `(batch, length, vocab_size)` and the cache.

        Raises:
            `ValueError`: `num_loops` is not a positive integer, the cache was made for other layers or loops, or
                `output_router_logits` without routers.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        is_flag = isinstance(output_router_logits, bool)
        require(is_flag, "output_router_logits", output_router_logits, "True, False or None")
        has_routers = self.config.num_experts > 0
        require(has_routers or not output_router_logits, "output_router_logits", output_router_logits, NO_ROUTERS)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            output_router_logits=output_router_logits,
            **self._outputs_wanted(logits_to_keep),
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        aux_loss = None
        if output_router_logits:
            aux_loss = load_balancing_loss(self.config, outputs.router_logits, attention_mask, logits.shape[0])
            self._check_gradient(aux_loss, outputs.last_hidden_state)
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return self._output_class(loss=loss, aux_loss=aux_loss, logits=logits, **rest)

    def _check_gradient(self, aux_loss: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Raise a `ValueError` where reentrant checkpoints would silently leave the routers without the loss."""
        if hidden_states.requires_grad and not aux_loss.requires_grad:
            has_checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in self.modules())
            allowed = "False with `output_router_logits`: the load-balancing loss gets no gradient through it"
            require(not has_checkpoints, "use_reentrant", True, allowed)

    def _outputs_wanted(self, logits_to_keep: int | torch.Tensor) -> dict:
        """What to tell the base model about the outputs that will be used."""
        return {}

    def generate_batch(self, *args, **kwargs):
        """Continuous batching is not supported: its cache has no slots for the visits of a loop."""
        raise ValueError("cache_implementation='paged' is not allowed: continuous batching is not supported.")

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` reads the signature
    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, **kwargs):
        """As in Transformers, which would read the prompt a second time where the cache holds all of it."""
        if next_sequence_length is not None and next_sequence_length <= 0 < input_ids.shape[1]:
            raise ValueError(
                f"cache is not allowed: it holds all {input_ids.shape[1]} tokens of the prompt; it must leave at "
                "least the last one to be read, as after `encode(input_ids[:, :-1])`."
            )
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """Have `generate(num_loops=...)` make a cache with a slot for each visit at that number of loops."""
        if "cache" in model_kwargs:  # under either name, in every version
            model_kwargs[CACHE_NAME] = model_kwargs.pop("cache")
        self._check_generation(generation_config, model_kwargs.get(CACHE_NAME), generation_mode, batch_size)
        if generation_config.prompt_lookup_num_tokens is not None:  # Transformers drafts beyond the last position
            max_cache_length += generation_config.prompt_lookup_num_tokens
        args = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        num_loops = model_kwargs.get("num_loops")
        if num_loops is None:
            return super()._prepare_cache_for_generation(*args)
        require(is_positive_int(num_loops), "num_loops", num_loops, "a positive integer")
        trained_config = self.config
        self.config = copy.copy(trained_config)
        self.config.num_loops = num_loops
        try:
            return super()._prepare_cache_for_generation(*args)
        finally:
            self.config = trained_config

    @staticmethod
    def _check_generation(generation_config, cache: Cache | None, generation_mode: GenerationMode, batch_size: int):
        """Raise a `ValueError` where Transformers would fail from deep inside, or give a wrong result."""
        check_kind(cache)
        early_exit = generation_config.assistant_early_exit
        allowed = "None; a model with fewer loops can be the `assistant_model`"
        require(early_exit is None, "assistant_early_exit", early_exit, allowed)
        implementation = generation_config.cache_implementation
        can_offload = torch.cuda.is_available() or implementation not in ("offloaded", "offloaded_static")
        require(can_offload, "cache_implementation", implementation, "another where there is no CUDA device")
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if implementation == "quantized" or isinstance(cache, QuantizedCache):
            is_wrong = (generation_config.num_beams > 1 and not QUANTIZED_CAN_BE_REORDERED) or (
                is_assisted and not QUANTIZED_REFUSES_TO_BE_CUT
            )
            allowed = "another with beams or assisted decoding in this version of Transformers"
            require(not is_wrong, "cache_implementation", "quantized", allowed)
        length = cache.get_seq_length() if cache is not None else 0
        if length == 0:
            return
        if is_assisted:
            raise ValueError(
                f"cache of {length} tokens is not allowed: it must be empty in assisted decoding, as Transformers "
                "would read the prompt a second time."
            )
        keys = cache.layers[0].keys
        copies = max(generation_config.num_beams, generation_config.num_return_sequences)
        if keys.dim() == 4 and keys.shape[0] != copies * batch_size:
            raise ValueError(
                f"cache of {keys.shape[0]} sequences is not allowed: it must hold {copies * batch_size}, {copies} for "
                f"each of the {batch_size} prompts; `cache.batch_repeat_interleave(n)` repeats them."
            )


def register_auto_classes(pretrained_class: type, base_model_class: type, classes: dict[str, type]) -> None:
    """Have every class know its base model, and `save_pretrained` bundle its code."""
    pretrained_class._base_model_class = base_model_class
    for auto_class, path in pretrained_class._auto_map.items():
        if auto_class != "AutoConfig":
            classes[path.split(".")[-1]].register_for_auto_class(auto_class)
