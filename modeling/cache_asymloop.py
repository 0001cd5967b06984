"""The cache of AsymLoop: global key/values, fixed while the decoder loops, and local ones that each loop refreshes.

Visit order is slot order: encoder layer `i` has slot `i`, decoder layer `j` in loop `r` has slot `Le + r * Ld + j`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .configuration_asymloop import AsymLoopConfig
from .configuration_looped import is_positive_int, require

KEEP_PAST = "call `activate_past_recording()` on the cache before the prompt to keep it"


@dataclass
class DecoderInput:
    """
    What the decoder starts from at some positions of the sequence.

    Args:
        states (`torch.Tensor` of shape `(batch, length, hidden_size)`): the first decoder state.
        inputs_embeds (`torch.Tensor` of shape `(batch, length, hidden_size)`): the token embeddings.
        position_ids (`torch.LongTensor` of shape `(batch, length)`): rotary positions.
    """

    states: torch.Tensor
    inputs_embeds: torch.Tensor
    position_ids: torch.LongTensor

    def __len__(self) -> int:
        return self.states.shape[1]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DecoderInput":
        return DecoderInput(function(self.states), function(self.inputs_embeds), function(self.position_ids))

    def last(self, length: int) -> "DecoderInput":
        return self.map(lambda tensor: tensor[:, tensor.shape[1] - length :])

    def append(self, new: "DecoderInput") -> "DecoderInput":
        return DecoderInput(
            torch.cat([self.states, new.states], dim=1),
            torch.cat([self.inputs_embeds, new.inputs_embeds], dim=1),
            torch.cat([self.position_ids, new.position_ids.expand(self.position_ids.shape[0], -1)], dim=1),
        )


class GrowingLayer(DynamicLayer):
    """
    A dynamic cache layer that writes new key/values beside the old ones, into room kept for them, where `DynamicLayer`
    copies all of them for every new token. While gradients are recorded it copies too: a graph may hold the old ones.
    """

    MIN_ROOM = 64  # positions
    ROOM = 1 / 16  # of the length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.forget_room()

    def __getstate__(self) -> dict:
        """A copy, which would write into the same room, and a pickle, which would hold it too, make their own."""
        if self.is_initialized:
            self.forget_room()
        return self.__dict__

    def forget_room(self) -> None:
        """Leave what is written so far untouched from now on: the next update makes a copy."""
        self._buffers = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled():
            return super().update(key_states, value_states, *args, **kwargs)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if not self._has_room(key_states, value_states, end):
            self._make_room(key_states, value_states, end)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, length:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def _has_room(self, key_states: torch.Tensor, value_states: torch.Tensor, end: int) -> bool:
        """Whether keys and values still lie at the beginning of the buffers, and the new ones fit behind them."""
        if self._buffers is None or self.get_seq_length() == 0:
            return False
        return all(
            kept.data_ptr() == buffer.data_ptr()
            and kept.shape[0] == buffer.shape[0]
            and end <= buffer.shape[2]
            and torch.promote_types(buffer.dtype, new.dtype) == buffer.dtype
            and buffer.is_inference() == torch.is_inference_mode_enabled()
            for kept, new, buffer in zip(
                (self.keys, self.values), (key_states, value_states), self._buffers, strict=True
            )
        )

    def _make_room(self, key_states: torch.Tensor, value_states: torch.Tensor, end: int) -> None:
        capacity = end + max(self.MIN_ROOM, int(self.ROOM * end))
        length = self.get_seq_length()
        buffers = []
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            dtype = torch.promote_types(kept.dtype, new.dtype)
            buffer = new.new_empty(*new.shape[:2], capacity, new.shape[3], dtype=dtype)
            if length > 0:
                buffer[:, :, :length] = kept
            buffers.append(buffer)
        self._buffers = tuple(buffers)


class WindowLayer(DynamicSlidingWindowLayer):
    """A sliding-window cache layer that lets go of the memory of a long input once only its end is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended = super().update(key_states, value_states, *args, **kwargs)
        if key_states.shape[-2] > 1 and not self.record_past:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return attended


class AsymLoopCache(Cache):
    """
    A Transformers cache with `Le` global slots and one local slot for each visit of a decoder layer.

    The encoder writes the global slots. While the decoder loops they are fixed: a write to one is an error. Positions
    that `AsymLoopModel.encode` has read but the decoder has not visited yet are kept as `pending`; the next forward
    pass visits them.

    Args:
        config (`AsymLoopConfig`): the configuration of the model that fills the cache.
        num_loops (`int`, *optional*): loops that the decoder will run; `config.num_loops` by default.
        local_kv (`str`, *optional*, defaults to `"per_loop"`):
            `"per_loop"` keeps the local KV of every loop, which is exact. `"last_loop"` keeps one local slot for each
            decoder layer: in every loop a new token reads what the last loop left for the earlier ones, with
            `num_loops` times less local memory. This is an approximation.

    Raises:
        `ValueError`: `num_loops` is not a positive integer, or `local_kv` is unknown.

    Example:

    ```python
    >>> cache = model.encode(input_ids[:, :-1])  # the context is read once
    >>> for num_loops in (1, 2, 4):
    ...     logits = model(input_ids[:, -1:], cache=cache.fork(num_loops)).logits
    ```
    """

    def __init__(self, config: AsymLoopConfig, num_loops: int | None = None, local_kv: str = "per_loop"):
        num_loops = config.num_loops if num_loops is None else num_loops
        require(is_positive_int(num_loops), "num_loops", num_loops, "a positive integer")
        kinds = ("per_loop", "last_loop")
        require(local_kv in kinds, "local_kv", local_kv, f"one of {kinds}")
        self.config = config
        self.num_loops = num_loops
        self.local_kv = local_kv
        self.pending: DecoderInput | None = None
        self._first_exact_position = 0
        self._global_is_fixed = False
        super().__init__(layers=[GrowingLayer() for _ in range(config.num_encoder_layers)] + self._new_local_layers())

    def _new_local_layers(self) -> list[CacheLayerMixin]:
        kept_loops = self.num_loops if self.local_kv == "per_loop" else 1
        window = self.config.local_window
        new_layer = GrowingLayer if window in (None, 1) else lambda: WindowLayer(sliding_window=window)
        return [new_layer() for _ in range(kept_loops * self.config.num_decoder_layers)]

    @property
    def _global_layers(self) -> list[CacheLayerMixin]:
        return self.layers[: self.config.num_encoder_layers]

    @property
    def _local_layers(self) -> list[CacheLayerMixin]:
        return self.layers[self.config.num_encoder_layers :]

    @property
    def num_visits(self) -> int:
        """The slots that the model addresses: the visits of a token."""
        return self.config.num_encoder_layers + self.num_loops * self.config.num_decoder_layers

    @property
    def num_pending(self) -> int:
        """Positions that are encoded but not yet visited by the decoder."""
        return 0 if self.pending is None else len(self.pending)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """While this context is open the global slots are fixed."""
        self._global_is_fixed = True
        try:
            yield
        finally:
            self._global_is_fixed = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Append new key/values of shape `(batch, num_key_value_heads, length, head_dim)` to the slot of one visit.

        Returns:
            The keys and values that the visit attends to: those kept in the slot and the new ones.

        Raises:
            `ValueError`: there is no such slot, or it is a global one and the decoder is looping.
        """
        require(0 <= layer_idx < self.num_visits, "layer_idx", layer_idx, f"a slot from 0 to {self.num_visits - 1}")
        num_global = self.config.num_encoder_layers
        if layer_idx < num_global:
            require(
                not self._global_is_fixed,
                "layer_idx",
                layer_idx,
                f"{num_global} or above while the decoder loops, as the {num_global} global slots are fixed then",
            )
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.local_kv == "per_loop":
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        loop, layer = divmod(layer_idx - num_global, self.config.num_decoder_layers)
        if loop == self.num_loops - 1:
            return super().update(key_states, value_states, num_global + layer, *args, **kwargs)
        return self._read_past(self.layers[num_global + layer], key_states, value_states)

    @staticmethod
    def _read_past(
        layer: CacheLayerMixin, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `layer.update` would return, without keeping the new key/values."""
        if not layer.is_initialized:
            return key_states, value_states
        length, _ = layer.get_mask_sizes(key_states.shape[-2])
        keys = torch.cat([layer.keys, key_states], dim=-2)[..., -length:, :]
        values = torch.cat([layer.values, value_states], dim=-2)[..., -length:, :]
        return keys, values

    def plan_decoding(self, length: int, num_outputs: int) -> int:
        """
        How many positions the decoder must visit when `length` new ones come: they and the pending ones, or, where
        `local_window` bounds how far local attention reaches, only the last of them that can influence the last
        `num_outputs` outputs or a later position (lazy prefill). Nothing is changed yet.
        """
        reach = self._local_reach()
        if reach is None or self._records_past:
            return self.num_pending + length
        return min(self.num_pending + length, reach + num_outputs)

    def take_decoder_input(self, new: DecoderInput, num_visited: int, num_outputs: int) -> DecoderInput:
        """
        The decoder's input at the last `num_visited` of the pending and the new positions; none is pending any more.
        Where earlier ones are skipped, the local KV from before them is dropped.
        """
        decoder_input = self._with_pending(new)
        if num_visited < len(decoder_input) and self._local_reach() > 0:
            self.layers[self.config.num_encoder_layers :] = self._new_local_layers()
            self._first_exact_position = self.get_seq_length() - num_outputs
        self.pending = None
        return decoder_input if num_visited == len(decoder_input) else decoder_input.last(num_visited)

    def _with_pending(self, new: DecoderInput) -> DecoderInput:
        return new if self.pending is None else self.pending.append(new)

    def _local_reach(self) -> int | None:
        """How many positions back the local KV of all visits together can carry anything; `None` if without limit."""
        window = self.config.local_window
        return None if window is None else self.num_loops * self.config.num_decoder_layers * (window - 1)

    @property
    def _records_past(self) -> bool:
        return any(getattr(layer, "record_past", False) for layer in self.layers)

    def add_pending(self, new: DecoderInput) -> None:
        """Keep the decoder's input at positions that are encoded only."""
        new = DecoderInput(new.states, new.inputs_embeds, new.position_ids.expand(new.states.shape[0], -1))
        self.pending = self._with_pending(new)

    def fork(self, num_loops: int | None = None, local_kv: str | None = None) -> "AsymLoopCache":
        """
        A cache that shares this one's global key/values and pending positions, without a copy, and has fresh local
        slots; neither sees what the other appends later.

        Args:
            num_loops: the loops of the fork; by default those of this cache.
            local_kv: as in the constructor; by default as in this cache.

        Raises:
            `ValueError`: the decoder has already visited positions that the fork would have to visit again.
        """
        num_loops = self.num_loops if num_loops is None else num_loops
        fork = AsymLoopCache(self.config, num_loops, self.local_kv if local_kv is None else local_kv)
        length, reach = self.get_seq_length(), fork._local_reach()
        needed = length if reach is None else min(length, reach)
        require(
            self.num_pending >= needed,
            "cache",
            f"AsymLoopCache of {length} positions, {self.num_pending} of them pending",
            f"one with at least {needed} pending positions to be forked; fork between `encode` and the next forward",
        )
        if self.num_pending < length and reach > 0:
            fork._first_exact_position = length - self.num_pending + reach
        if self._records_past:
            fork.activate_past_recording()
        for ours, theirs in zip(self._global_layers, fork._global_layers, strict=True):
            if ours.is_initialized:
                ours.forget_room()
                theirs.lazy_initialization(ours.keys, ours.values)
                theirs.keys, theirs.values = ours.keys, ours.values
        fork.pending = self.pending
        return fork

    def reset(self) -> None:
        """Empty every slot."""
        records_past = self._records_past
        self.layers = [GrowingLayer() for _ in self._global_layers] + self._new_local_layers()
        if records_past:
            self.activate_past_recording()
        self.pending = None
        self._first_exact_position = 0

    def crop(self, tokens_to_remove: int) -> None:
        """
        Remove the last `-tokens_to_remove` positions (a negative number, as in Transformers).

        Raises:
            `ValueError`: the number is positive, there are not that many positions, or the local KV that decoding
                would need from there on was not kept; the cache is left as it was.
        """
        length = self.get_seq_length()
        is_int = isinstance(tokens_to_remove, int)
        require(
            is_int and -length <= tokens_to_remove <= 0, "tokens_to_remove", tokens_to_remove, f"from {-length} to 0"
        )
        remaining = length + tokens_to_remove
        if remaining == 0:
            return self.reset()
        local_tokens = min(0, tokens_to_remove + self.num_pending)
        layers = [layer for layer in self._local_layers if layer.is_initialized and layer.get_seq_length() > 0]
        if local_tokens < 0:
            kept = all(self._can_crop(layer, local_tokens) for layer in layers)
            require(kept, "tokens_to_remove", tokens_to_remove, f"0: the window has moved on; {KEEP_PAST}")
        require(
            remaining >= self._first_exact_position,
            "tokens_to_remove",
            tokens_to_remove,
            f"at least {self._first_exact_position - length}: there is no local KV before that; {KEEP_PAST}",
        )
        for layer in self._global_layers:
            layer.crop(tokens_to_remove)
        if local_tokens < 0 or self._records_past:
            for layer in layers:
                layer.crop(local_tokens)
        if self.pending is not None:
            kept = self.num_pending + tokens_to_remove
            self.pending = self.pending.map(lambda tensor: tensor[:, :kept]) if kept > 0 else None

    def _can_crop(self, layer: CacheLayerMixin, local_tokens: int) -> bool:
        """Whether a local slot still has what the window needs once the last `-local_tokens` positions are gone."""
        window, length = self.config.local_window, layer.get_seq_length()
        needed = length + local_tokens if window is None else min(window - 1, length + local_tokens)
        return layer.keys.shape[-2] + local_tokens >= needed

    def _map_pending(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.pending is not None:
            self.pending = self.pending.map(function)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_pending(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_pending(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_pending(lambda tensor: tensor[indices, ...])
