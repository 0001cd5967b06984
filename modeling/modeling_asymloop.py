"""AsymLoop, the asymmetric looped transformer: a causal encoder runs once, a weight-tied decoder loops over it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .backbones import BACKBONES, new_layer
from .cache_asymloop import AsymLoopCache, DecoderInput
from .configuration_asymloop import AsymLoopConfig
from .configuration_looped import is_positive_int, require
from .from_dense import from_dense
from .joint_mask import JointMask, joint_masks
from .layers_asymloop import DECODER_LAYERS, ENCODER_LAYERS
from .modeling_looped import (
    CACHE_NAME,
    LoopedCausalLM,
    LoopedPreTrainedModel,
    check_num_slots,
    check_padding,
    check_position_ids,
    embed,
    next_position_ids,
    one_cache,
    register_auto_classes,
    takes_old_cache_name,
)

GlobalKeyValues = list[tuple[torch.Tensor, torch.Tensor]]


class AsymLoopEncoder(nn.Module):
    def __init__(self, config: AsymLoopConfig):
        super().__init__()
        layer_class, is_sparse = ENCODER_LAYERS[config.backbone], config.is_sparse("encoder")
        self.layers = nn.ModuleList(
            [new_layer(layer_class, config, i, is_sparse) for i in range(config.num_encoder_layers)]
        )

    def forward(
        self, hidden_states: torch.Tensor, cache: Cache | None, **kwargs
    ) -> tuple[torch.Tensor, GlobalKeyValues]:
        global_kv = []
        for layer in self.layers:
            hidden_states, keys, values = layer(hidden_states, **{CACHE_NAME: cache}, **kwargs)
            global_kv.append((keys, values))
        return hidden_states, global_kv


class AsymLoopDecoder(nn.Module):
    def __init__(self, config: AsymLoopConfig):
        super().__init__()
        self.config = config
        layer_class, is_sparse = DECODER_LAYERS[config.backbone], config.is_sparse("decoder")
        self.layers = nn.ModuleList(
            [new_layer(layer_class, config, j, is_sparse) for j in range(config.num_decoder_layers)]
        )

    def forward(
        self,
        decoder_input: DecoderInput,
        global_kv: GlobalKeyValues,
        num_loops: int,
        cache: Cache | None,
        attention_mask: JointMask,
        **kwargs,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The last states and, if wanted, the mean share of attention to the global KV in each visit."""
        num_global, num_local = self.config.num_encoder_layers, self.config.num_decoder_layers
        global_kv_map = self.config.global_kv_map
        # A position with a window of 1 reads no local KV but its own, so there is nothing to cache.
        cache = None if self.config.local_window == 1 else cache
        kwargs |= {CACHE_NAME: cache, "attention_mask": attention_mask}
        states, shares = decoder_input.states, []
        for loop in range(num_loops):
            states = self._inject(states, decoder_input, loop)
            for j, layer in enumerate(self.layers):
                slot = num_global + loop * num_local + j
                states, share = layer(states, *global_kv[global_kv_map[j]], slot, **kwargs)
                shares.append(None if share is None else attention_mask.mean_over_tokens(share.detach()))
        return states, shares

    def _inject(self, states: torch.Tensor, decoder_input: DecoderInput, loop: int) -> torch.Tensor:
        injection = self.config.input_injection
        if injection == "state" and loop > 0:
            return states + decoder_input.states
        if injection == "embedding" and (loop > 0 or self.config.decoder_init == "encoder"):
            return states + decoder_input.inputs_embeds
        return states


@dataclass
class AsymLoopModelOutputWithPast(MoeModelOutputWithPast):
    """
    Args (those of `MoeModelOutputWithPast`, and):
        attention_share (`tuple[torch.FloatTensor]`, with `output_attention_share=True`): for each visit of a decoder
            layer, in slot order, the mean share of attention that goes to the global KV, of shape
            `(batch, num_attention_heads)`; over the visited positions that are not padding (with a ready mask of four
            dimensions over all of them), without a gradient.
    """

    attention_share: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class AsymLoopCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """As `MoeCausalLMOutputWithPast`; `attention_share` is that of [`AsymLoopModelOutputWithPast`]."""

    attention_share: tuple[torch.FloatTensor, ...] | None = None


class AsymLoopPreTrainedModel(LoopedPreTrainedModel):
    config: AsymLoopConfig
    config_class = AsymLoopConfig
    _no_split_modules = [layer.__name__ for layer in (*ENCODER_LAYERS.values(), *DECODER_LAYERS.values())]
    _auto_map = {
        "AutoConfig": "configuration_asymloop.AsymLoopConfig",
        "AutoModel": "modeling_asymloop.AsymLoopModel",
        "AutoModelForCausalLM": "modeling_asymloop.AsymLoopForCausalLM",
        "AutoModelForSequenceClassification": "modeling_asymloop.AsymLoopForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_asymloop.AsymLoopForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_asymloop.AsymLoopForQuestionAnswering",
    }


class AsymLoopModel(AsymLoopPreTrainedModel):
    def __init__(self, config: AsymLoopConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.encoder = AsymLoopEncoder(config)
        self.decoder = AsymLoopDecoder(config)
        backbone = BACKBONES[config.backbone]
        self.norm = backbone.norm(config)
        self.rotary_emb = backbone.rotary(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_old_cache_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        output_attention_share: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AsymLoopModelOutputWithPast:
        """
        Args (those of `LlamaModel`, and):
            num_loops: loops to run, more or fewer than `config.num_loops`; with an `AsymLoopCache`, its own number.
            logits_to_keep: how many of the last states will be used (0 for all). With a windowed model and an
                `AsymLoopCache` the decoder visits, and returns, only the positions that can influence them.
            past_key_values: another name of `cache`, for Transformers before 5.24.
            output_attention_share: return how much of its attention each visit of a decoder layer gives to the global
                KV.

        Returns:
            The normalised states of shape `(batch, length, hidden_size)` after the last loop, the cache and, if
            wanted, the attention shares.

        Raises:
            `ValueError`: `num_loops` is not a positive integer, or the cache was made for other layers or loops.
        """
        cache = one_cache(cache, past_key_values)
        num_loops = self._check_loops(num_loops, cache)
        inputs_embeds = embed(self, input_ids, inputs_embeds)
        # As in Transformers, positions alone mark packed documents, and only where no cache is given.
        may_be_packed = position_ids is not None and attention_mask is None and cache is None
        if use_cache and cache is None:
            cache = AsymLoopCache(self.config, num_loops)
        if position_ids is None:
            position_ids = next_position_ids(inputs_embeds, cache)
        check_position_ids(position_ids, inputs_embeds)

        length = num_visited = num_outputs = inputs_embeds.shape[1]
        if isinstance(cache, AsymLoopCache) and not may_be_packed:
            if isinstance(logits_to_keep, int) and 0 < logits_to_keep < length:
                num_outputs = logits_to_keep
            num_visited = cache.plan_decoding(length, num_outputs)
        encoder_mask, joint_mask = joint_masks(
            self.config,
            inputs_embeds,
            attention_mask,
            position_ids,
            None if may_be_packed else cache,
            num_visited,
        )

        decoder_input, global_kv, position_embeddings = self._encode(
            inputs_embeds, encoder_mask, position_ids, cache, use_cache=use_cache, **kwargs
        )
        if isinstance(cache, AsymLoopCache):
            decoder_input = cache.take_decoder_input(decoder_input, num_visited, num_outputs)
        if decoder_input.position_ids is not position_ids:
            position_embeddings = self.rotary_emb(decoder_input.states, decoder_input.position_ids)

        with cache.decoding() if isinstance(cache, AsymLoopCache) else nullcontext():
            hidden_states, shares = self.decoder(
                decoder_input,
                global_kv,
                num_loops,
                cache,
                joint_mask,
                output_attention_share=output_attention_share,
                position_ids=decoder_input.position_ids,
                position_embeddings=position_embeddings,
                use_cache=use_cache,
                **kwargs,
            )
        return AsymLoopModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states[:, -length:]),
            attention_share=tuple(shares) if output_attention_share else None,
            **{CACHE_NAME: cache},
        )

    @takes_old_cache_name
    def encode(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: AsymLoopCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: AsymLoopCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AsymLoopCache:
        """
        Run the encoder alone: encode once, decode at any depth with `cache.fork(num_loops)`.

        Args:
            input_ids, inputs_embeds: tokens of shape `(batch, length)`, or their embeddings.
            attention_mask: padding of shape `(batch, past + length)`, 1 where there is a token.
            position_ids: rotary positions, by default those that follow the cache.
            cache, past_key_values: a cache to append to; a new one by default.

        Returns:
            A cache whose global slots are filled and whose positions wait for the decoder.

        Raises:
            `ValueError`: `cache` is not an `AsymLoopCache`, or was made for other layers; `position_ids` of packed
                documents (encode them as a batch instead); the model is being trained with gradient checkpointing,
                which fills no cache.
        """
        cache = one_cache(cache, past_key_values)
        require(cache is None or isinstance(cache, AsymLoopCache), "cache", cache, "an `AsymLoopCache` or None")
        num_loops = kwargs.pop("num_loops", None)
        require(
            num_loops is None, "num_loops", num_loops, "left to `fork`: what is encoded serves any number of loops"
        )
        cache = AsymLoopCache(self.config) if cache is None else cache
        self._check_loops(None, cache)
        inputs_embeds = embed(self, input_ids, inputs_embeds)
        if position_ids is None:
            position_ids = next_position_ids(inputs_embeds, cache)
        elif attention_mask is None and not (position_ids.diff() == 1).all():
            raise ValueError("position_ids must rise by one: packed documents cannot share a cache, a batch can.")
        check_position_ids(position_ids, inputs_embeds)
        check_padding(attention_mask, inputs_embeds, cache)
        encoder_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, cache, position_ids)
        end = cache.get_seq_length() + inputs_embeds.shape[1]
        decoder_input, _, _ = self._encode(inputs_embeds, encoder_mask, position_ids, cache, **kwargs)
        if cache.get_seq_length() != end:
            raise ValueError("Gradient checkpointing fills no cache: call `eval()` before `encode`.")
        cache.add_pending(decoder_input)
        return cache

    def _encode(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor,
        cache: Cache | None,
        **kwargs,
    ) -> tuple[DecoderInput, GlobalKeyValues, tuple[torch.Tensor, torch.Tensor]]:
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        hidden_states, global_kv = self.encoder(
            inputs_embeds,
            cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        states = hidden_states if self.config.decoder_init == "encoder" else inputs_embeds
        return DecoderInput(states, inputs_embeds, position_ids), global_kv, position_embeddings

    def _check_loops(self, num_loops: int | None, cache: Cache | None) -> int:
        """The loops to run: those asked for, which must be those of the cache, or the trained ones."""
        require(num_loops is None or is_positive_int(num_loops), "num_loops", num_loops, "a positive integer")
        if not isinstance(cache, AsymLoopCache):
            num_loops = self.config.num_loops if num_loops is None else num_loops
            num_global = self.config.num_encoder_layers
            num_visits = num_global + num_loops * self.config.num_decoder_layers
            # With a window of 1 a cache that grows as it is written to has no local slots.
            check_num_slots(cache, num_visits, *([num_global] if self.config.local_window == 1 else []))
            return num_loops
        for field in ("num_encoder_layers", "num_decoder_layers", "local_window", "num_key_value_heads", "head_dim"):
            made_for, value = getattr(cache.config, field), getattr(self.config, field)
            require(made_for == value, f"cache.config.{field}", made_for, f"{value}, as in the model")
        require(
            num_loops in (None, cache.num_loops), "num_loops", num_loops, f"{cache.num_loops}, as the cache was made"
        )
        return cache.num_loops


class AsymLoopForCausalLM(LoopedCausalLM, AsymLoopPreTrainedModel, GenerationMixin):
    """The language model. `output_attention_share=True` is passed on to [`AsymLoopModel`]."""

    _output_class = AsymLoopCausalLMOutputWithPast

    @classmethod
    def from_dense(
        cls,
        model_or_path: PreTrainedModel | str | PathLike,
        num_encoder_layers: int | None = None,
        num_decoder_layers: int | None = None,
        num_loops: int = 3,
        encoder_from: Sequence[int] | None = None,
        decoder_from: Sequence[int] | None = None,
        silent_decoder: bool = False,
        input_injection: str = "none",
        output_loading_info: bool = False,
        **fields,
    ) -> "AsymLoopForCausalLM":
        """
        Start from a trained Llama, Mistral, Qwen2, Mixtral, OLMo, OLMo2 or OLMoE: copy some of its layers into encoder
        and decoder, and its embeddings, norm and head. Its tokenizer is the model's too.

        Args:
            model_or_path: the trained model, or the folder or hub name of its checkpoint.
            num_encoder_layers, num_decoder_layers: by default the layers that are named, or half of the dense ones.
            encoder_from: the dense layer that each encoder layer is copied from, by default the first ones.
            decoder_from: the dense layer that each decoder layer is copied from, by default the last ones.
            silent_decoder: set the output of the decoder's layers to zero. With `encoder_from` all layers, the model
                then starts as the dense model, exactly.
            input_injection: as in the configuration; the dense layers have seen none.
            output_loading_info: return also what was copied, dropped and made new, by the names of the weights.
            fields: other fields of [`AsymLoopConfig`]; the backbone is the dense model's.

        Returns:
            The model in evaluation mode; what was copied, dropped and made new is logged.

        Raises:
            `ValueError`: a kind of model that is not supported, a checkpoint that lacks weights, layers out of range,
                or a field that `AsymLoopConfig` does not have.
        """
        fields |= {"num_loops": num_loops, "input_injection": input_injection}
        model, info = from_dense(
            cls,
            model_or_path,
            num_encoder_layers,
            num_decoder_layers,
            encoder_from,
            decoder_from,
            silent_decoder,
            **fields,
        )
        return (model, info) if output_loading_info else model

    def encode(self, *args, **kwargs) -> AsymLoopCache:
        """Run the encoder alone: see [`AsymLoopModel.encode`]."""
        return self.model.encode(*args, **kwargs)

    def _outputs_wanted(self, logits_to_keep: int | torch.Tensor) -> dict:
        return {"logits_to_keep": logits_to_keep}

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """An `AsymLoopCache` is the default cache of `generate`."""
        is_default = generation_config.use_cache is not False and generation_config.cache_implementation is None
        given = model_kwargs.get("cache", model_kwargs.get(CACHE_NAME))
        if given is None and is_default:
            self._check_generation(generation_config, None, generation_mode, batch_size)
            model_kwargs[CACHE_NAME] = AsymLoopCache(self.config, model_kwargs.get("num_loops"))
            if generation_config.is_assistant:
                model_kwargs[CACHE_NAME].activate_past_recording()
            return
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        made = model_kwargs.get(CACHE_NAME)
        if self.config.local_window == 1 and made is not given:
            # Local slots stay empty; offloading would wait for them, and Transformers 5.18 cannot cut them.
            del made.layers[self.config.num_encoder_layers :]


class AsymLoopForSequenceClassification(GenericForSequenceClassification, AsymLoopPreTrainedModel): ...


class AsymLoopForTokenClassification(GenericForTokenClassification, AsymLoopPreTrainedModel): ...


class AsymLoopForQuestionAnswering(GenericForQuestionAnswering, AsymLoopPreTrainedModel): ...


register_auto_classes(AsymLoopPreTrainedModel, AsymLoopModel, vars())
