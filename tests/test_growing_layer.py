"""The cache layer of global KV writes new key/values into room that it keeps, and never copies the old ones."""

import copy
import pickle

import pytest
import torch
from conftest import asymloop, tokens
from transformers.cache_utils import DynamicLayer

from asymloop_hf.modeling.cache_asymloop import GrowingLayer


def states(length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, length, 4), torch.randn(batch, 3, length, 4)


def assert_same(layer: GrowingLayer, reference: DynamicLayer):
    assert layer.get_seq_length() == reference.get_seq_length()
    torch.testing.assert_close(layer.keys, reference.keys, rtol=0, atol=0)
    torch.testing.assert_close(layer.values, reference.values, rtol=0, atol=0)


def both_updated(layers, length, batch=2):
    new = states(length, batch)
    for layer in layers:
        layer.update(*new)


CHANGES = {
    "crop": lambda layer: layer.crop(-3),
    "crop to nothing": lambda layer: layer.crop(-layer.get_seq_length()),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "reset": lambda layer: layer.reset(),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 1100])
def test_it_holds_what_a_dynamic_layer_holds(change, length):
    layers = GrowingLayer(), DynamicLayer()
    both_updated(layers, max(length, 3))
    for new in (1, 1, length, 1):
        both_updated(layers, new)
    assert_same(*layers)
    for layer in layers:
        change(layer)
    batch = layers[1].keys.shape[0] if layers[1].is_initialized and layers[1].keys.numel() else 2
    for new in (1, 70, 1):
        both_updated(layers, new, batch)
        assert_same(*layers)


@torch.no_grad()
def test_new_tokens_move_nothing_until_the_room_is_full():
    layer = GrowingLayer()
    layer.update(*states(1000))
    places = set()
    for _ in range(62):
        layer.update(*states(1))
        places.add(layer.keys.data_ptr())
    assert len(places) == 1


@torch.no_grad()
def test_a_copy_is_independent():
    layer = GrowingLayer()
    layer.update(*states(5))
    twin = copy.deepcopy(layer)
    twin.update(*states(1))
    kept = layer.keys.clone()
    layer.update(*states(1))
    assert torch.equal(layer.keys[:, :, :5], kept) and torch.equal(twin.keys[:, :, :5], kept)
    assert not torch.equal(layer.keys, twin.keys)


def test_shallow_copies_do_not_share_the_room():
    layer = GrowingLayer()
    with torch.no_grad():
        layer.update(*states(5))
        twin = copy.copy(layer)
        new, other = states(1), states(1)
        keys, _ = layer.update(*new)
        other_keys, _ = twin.update(*other)
    assert torch.equal(keys[:, :, 5:], new[0]) and torch.equal(other_keys[:, :, 5:], other[0])


@torch.no_grad()
def test_a_pickle_holds_no_room():
    layer = GrowingLayer()
    layer.update(*states(1000))
    assert len(pickle.dumps(layer)) < 1.2 * (layer.keys.nbytes + layer.values.nbytes)


@torch.no_grad()
def test_what_is_cached_is_never_narrowed():
    layers = GrowingLayer(), DynamicLayer()
    both_updated(layers, 10)
    narrow = [tensor.bfloat16() for tensor in states(1)]
    for _ in range(70):
        for layer in layers:
            layer.update(*narrow)
    assert layers[0].keys.dtype == torch.float32
    assert_same(*layers)
    layers = GrowingLayer(), DynamicLayer()
    wide = states(1)
    for layer in layers:
        layer.update(*narrow)
        layer.update(*wide)
    assert_same(*layers)


def test_a_prompt_read_in_inference_mode_or_under_autocast_can_be_continued_without():
    model, input_ids = asymloop(), tokens(2, 12)
    for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context, torch.no_grad():
            cache = model(input_ids[:, :9], use_cache=True).past_key_values
        with torch.no_grad():
            logits = model(input_ids[:, 9:], cache=cache).logits
            torch.testing.assert_close(logits, model(input_ids).logits[:, 9:], rtol=0.1, atol=0.1)


def test_frozen_keys_and_values_may_be_cached_while_queries_are_trained():
    model, input_ids = asymloop(), tokens(2, 12)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    model(input_ids, use_cache=False).logits.sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    first = model(input_ids[:, :5], use_cache=True)
    second = model(input_ids[:, 5:], cache=first.past_key_values)
    (first.logits.sum() + second.logits.sum()).backward()
    actual = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_gradients_flow_through_the_cache():
    model, input_ids = asymloop().train(), tokens(2, 9)
    expected = model(input_ids, labels=input_ids, use_cache=False)
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    first = model(input_ids[:, :5], use_cache=True)
    second = model(input_ids[:, 5:], cache=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)
    model.loss_function(logits=logits, labels=input_ids, vocab_size=model.vocab_size).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_forks_that_grow_do_not_see_each_other():
    model, input_ids = asymloop(), tokens(1, 12)
    cache = model.encode(input_ids[:, :8])
    forks = cache.fork(1), cache.fork(2)
    continuations = tokens(1, 4, seed=1), tokens(1, 4, seed=2)
    for position in range(4):
        for fork, continuation in zip(forks, continuations, strict=True):
            model(continuation[:, position : position + 1], cache=fork)
    for fork, continuation in zip(forks, continuations, strict=True):
        logits = model(input_ids[:, :1], cache=fork).logits
        whole = torch.cat([input_ids[:, :8], continuation, input_ids[:, :1]], 1)
        expected = model(whole, num_loops=fork.num_loops).logits[:, -1:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_decoding_neither_concatenates_nor_copies_the_global_kv(monkeypatch):
    model = asymloop(local_window=3)
    cache = model(tokens(1, 100), use_cache=True).past_key_values
    concatenate = torch.cat

    def short_cat(tensors, dim=0, **kwargs):
        joined = concatenate(tensors, dim, **kwargs)
        assert joined.dim() < 4 or joined.shape[2] < 10
        return joined

    monkeypatch.setattr(torch, "cat", short_cat)
    places = {layer.keys.data_ptr() for layer in cache.layers[:2]}
    for _ in range(3):
        model(tokens(1, 1), cache=cache)
    assert {layer.keys.data_ptr() for layer in cache.layers[:2]} == places


@torch.no_grad()
def test_a_window_keeps_no_memory_of_a_long_prompt():
    cache = asymloop(local_window=3)(tokens(1, 100), use_cache=True).past_key_values
    for layer in cache.layers[2:]:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
