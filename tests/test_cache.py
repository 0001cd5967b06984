"""The cache: what is cached gives the logits of the uncached forward pass, exactly."""

import copy
import pickle

import pytest
import torch
from conftest import BACKBONES, asymloop, asymloop_config, fullloop, tokens
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import StaticLayer

from asymloop_hf import AsymLoopCache
from asymloop_hf.modeling.modeling_looped import CACHE_NAME

pytestmark = pytest.mark.usefixtures("float64")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
WINDOWS = [None, 1, 2, 4]
VARIANTS = [
    {},
    {"decoder_init": "embedding", "input_injection": "state"},
    {"input_injection": "none", "num_encoder_layers": 3, "global_kv_layers": [2, 0]},
]


def new_cache(kind: str, config, **options):
    return {
        "asymloop": lambda: AsymLoopCache(config, **options),
        "dynamic": lambda: DynamicCache(config=config),
        "dynamic without a config": lambda: DynamicCache(),
        "static": lambda: StaticCache(config, max_cache_len=24),
    }[kind]()


def run_in_chunks(model, input_ids, chunks, cache, attention_mask=None, position_ids=None):
    logits, start = [], 0
    for size in chunks:
        end = start + size
        logits.append(
            model(
                input_ids[:, start:end],
                cache=cache,
                attention_mask=None if attention_mask is None else attention_mask[:, :end],
                position_ids=None if position_ids is None else position_ids[:, start:end],
            ).logits
        )
        start = end
    return torch.cat(logits, 1)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 6), (1, 8, 3)])
@pytest.mark.parametrize("local_window", WINDOWS)
@pytest.mark.parametrize("kind", ["asymloop", "dynamic", "dynamic without a config", "static"])
def test_any_chunking_equals_the_uncached_forward(kind, local_window, chunks):
    for variant in VARIANTS:
        model = asymloop(local_window=local_window, **variant)
        input_ids = tokens(2, 12)
        logits = run_in_chunks(model, input_ids, chunks, new_cache(kind, model.config))
        torch.testing.assert_close(logits, model(input_ids, use_cache=False).logits, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("local_window", [None, 1, 3])
@pytest.mark.parametrize("name", [name for name in BACKBONES if name != "llama"])
def test_every_backbone_has_the_same_caches(name, local_window):
    model = asymloop(local_window=local_window, **BACKBONES[name])
    input_ids = tokens(2, 12)
    expected = model(input_ids, use_cache=False).logits
    for kind in ("asymloop", "dynamic", "static"):
        logits = run_in_chunks(model, input_ids, (5, 1, 6), new_cache(kind, model.config))
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    encoded = model.encode(input_ids[:, :7])
    for num_loops in (1, 4):
        expected = model(input_ids, num_loops=num_loops, use_cache=False).logits[:, 7:]
        logits = run_in_chunks(model, input_ids[:, 7:], (1, 4), encoded.fork(num_loops))
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    lazy = model(input_ids, cache=AsymLoopCache(model.config), logits_to_keep=2).logits
    torch.testing.assert_close(lazy, model(input_ids, use_cache=False).logits[:, -2:], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("local_window", WINDOWS)
@pytest.mark.parametrize("kind", ["asymloop", "dynamic", "static"])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_padding_under_a_cache(kind, local_window, padding_side, attn_implementation):
    model = asymloop(attn_implementation, local_window=local_window)
    short, long = tokens(1, 7), tokens(1, 12, seed=1)
    padding = torch.zeros(1, 5, dtype=torch.long)
    row = torch.cat([padding, short] if padding_side == "left" else [short, padding], 1)
    input_ids = torch.cat([row, long])
    attention_mask = (input_ids != 0).long()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(kind, model.config)
    logits = run_in_chunks(model, input_ids, (8, 1, 3), cache, attention_mask, position_ids)
    torch.testing.assert_close(logits[0][row[0] != 0], model(short).logits[0], **TOLERANCE)
    torch.testing.assert_close(logits[1:], model(long).logits, **TOLERANCE)


def test_slots_hold_one_visit_each():
    model = asymloop(num_encoder_layers=2, num_decoder_layers=1, num_loops=3, local_window=3)
    cache = AsymLoopCache(model.config)
    model(tokens(1, 8), cache=cache)
    assert len(cache) == model.config.num_hidden_layers == 5
    assert cache.get_seq_length() == 8
    assert [layer.keys.shape[-2] for layer in cache.layers] == [8, 8, 2, 2, 2]


def test_the_encoder_cannot_be_overwritten_while_the_decoder_loops():
    cache = AsymLoopCache(asymloop_config())
    key_values = torch.zeros(1, 2, 3, 8)
    cache.update(key_values, key_values, 0)
    with cache.decoding():
        with pytest.raises(
            ValueError, match="layer_idx=1 .*2 or above while the decoder loops.*2 global slots are fixed"
        ):
            cache.update(key_values, key_values, 1)
        cache.update(key_values, key_values, 2)
    cache.update(key_values, key_values, 1)
    with pytest.raises(ValueError, match="layer_idx=8 is not allowed: it must be a slot from 0 to 7"):
        cache.update(key_values, key_values, 8)


def test_global_slots_stay_fixed_from_loop_to_loop():
    model = asymloop()
    input_ids = tokens(1, 6)
    one_loop, many_loops = AsymLoopCache(model.config, num_loops=1), AsymLoopCache(model.config, num_loops=9)
    model(input_ids, cache=one_loop)
    model(input_ids, cache=many_loops)
    for slot in range(model.config.num_encoder_layers):
        assert torch.equal(one_loop.layers[slot].keys, many_loops.layers[slot].keys)
        assert torch.equal(one_loop.layers[slot].values, many_loops.layers[slot].values)


# Encode once, decode at any depth


@torch.no_grad()
@pytest.mark.parametrize("local_window", WINDOWS)
@pytest.mark.parametrize("num_encoded", [(7,), (3, 4), (1, 1, 5)])
def test_encode_once_decode_at_any_depth(local_window, num_encoded):
    for variant in VARIANTS:
        model = asymloop(local_window=local_window, **variant)
        input_ids = tokens(2, 12)
        encoded = None
        for chunk in input_ids[:, :7].split(num_encoded, dim=1):
            encoded = model.encode(chunk, cache=encoded)
        for num_loops in (1, 2, 5):
            expected = model(input_ids, num_loops=num_loops, use_cache=False).logits[:, 7:]
            fork = encoded.fork(num_loops)
            torch.testing.assert_close(run_in_chunks(model, input_ids[:, 7:], (1, 4), fork), expected, **TOLERANCE)
        assert encoded.get_seq_length() == encoded.num_pending == 7


def test_a_fork_shares_the_global_tensors():
    model = asymloop()
    encoded = model.encode(tokens(1, 6))
    fork = encoded.fork(num_loops=2)
    for slot in range(model.config.num_encoder_layers):
        assert fork.layers[slot].keys.data_ptr() == encoded.layers[slot].keys.data_ptr()
    assert fork.pending.states.data_ptr() == encoded.pending.states.data_ptr()
    assert fork.num_loops == 2


@torch.no_grad()
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_encoding_a_padded_batch(padding_side):
    model = asymloop()
    short, long = tokens(1, 4), tokens(1, 7, seed=1)
    padding = torch.zeros(1, 3, dtype=torch.long)
    row = torch.cat([padding, short] if padding_side == "left" else [short, padding], 1)
    next_tokens = tokens(2, 2, seed=2)
    attention_mask = torch.cat([(torch.cat([row, long]) != 0).long(), torch.ones(2, 2, dtype=torch.long)], 1)
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    cache = model.encode(torch.cat([row, long]), attention_mask[:, :7], position_ids[:, :7])
    logits = model(next_tokens, attention_mask=attention_mask, position_ids=position_ids[:, 7:], cache=cache).logits
    for i, context in enumerate((short, long)):
        expected = model(torch.cat([context, next_tokens[i : i + 1]], 1)).logits[:, -2:]
        torch.testing.assert_close(logits[i : i + 1], expected, **TOLERANCE)


def test_a_cache_whose_positions_were_decoded_cannot_be_forked():
    model = asymloop()
    cache = model.encode(tokens(1, 6))
    model(tokens(1, 1), cache=cache)
    with pytest.raises(ValueError, match="7 positions, 0 of them pending.*fork between `encode` and the next forward"):
        cache.fork()


@torch.no_grad()
def test_a_window_of_one_can_be_forked_any_time():
    model = asymloop(local_window=1)
    input_ids = tokens(1, 8)
    cache = AsymLoopCache(model.config)
    model(input_ids[:, :6], cache=cache)
    logits = model(input_ids[:, 6:], cache=cache.fork(num_loops=5)).logits
    torch.testing.assert_close(logits, model(input_ids, num_loops=5).logits[:, 6:], **TOLERANCE)


# Lazy prefill


@torch.no_grad()
@pytest.mark.parametrize("local_window", [1, 2, 3])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_lazy_prefill_visits_only_what_can_matter(local_window, num_outputs):
    model = asymloop(local_window=local_window, num_decoder_layers=2, num_loops=2)
    input_ids = tokens(2, 40)
    visited = []
    model.model.decoder.register_forward_pre_hook(lambda module, args: visited.append(len(args[0])))
    cache = AsymLoopCache(model.config)
    logits = model(input_ids[:, :36], cache=cache, logits_to_keep=num_outputs).logits
    assert visited == [4 * (local_window - 1) + num_outputs]
    expected = model(input_ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected[:, 36 - num_outputs : 36], **TOLERANCE)
    later = run_in_chunks(model, input_ids[:, 36:], (1, 3), cache)
    torch.testing.assert_close(later, expected[:, 36:], **TOLERANCE)


@torch.no_grad()
def test_lazy_prefill_in_chunks_and_after_encode():
    model = asymloop(local_window=2)
    input_ids = tokens(2, 60)
    expected = model(input_ids, use_cache=False).logits
    cache = AsymLoopCache(model.config)
    for start, end in ((0, 20), (20, 50)):
        logits = model(input_ids[:, start:end], cache=cache, logits_to_keep=1).logits
        torch.testing.assert_close(logits, expected[:, end - 1 : end], **TOLERANCE)
    torch.testing.assert_close(model(input_ids[:, 50:], cache=cache).logits, expected[:, 50:], **TOLERANCE)
    cache = model.encode(input_ids[:, :50])
    logits = model(input_ids[:, 50:], cache=cache, logits_to_keep=4).logits
    torch.testing.assert_close(logits, expected[:, 56:], **TOLERANCE)


def test_lazy_prefill_of_a_padded_batch():
    model = asymloop(local_window=2)
    short, long = tokens(1, 25), tokens(1, 30, seed=1)
    input_ids = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1), long])
    attention_mask = (input_ids != 0).long()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    cache = AsymLoopCache(model.config)
    logits = model(
        input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, logits_to_keep=1
    ).logits
    torch.testing.assert_close(logits[0], model(short).logits[0, -1:], **TOLERANCE)
    torch.testing.assert_close(logits[1], model(long).logits[0, -1:], **TOLERANCE)


@pytest.mark.parametrize("local_window", WINDOWS)
def test_logits_to_keep_without_a_cache(local_window):
    model = asymloop(local_window=local_window)
    input_ids = tokens(2, 12)
    expected = model(input_ids).logits
    for use_cache in (False, True):
        kept = model(input_ids, logits_to_keep=3, use_cache=use_cache).logits
        torch.testing.assert_close(kept, expected[:, -3:], **TOLERANCE)
    for choice, positions in ((torch.tensor([1, 5]), [1, 5]), (-2, range(2, 12)), (50, range(12))):
        for cache in (None, AsymLoopCache(model.config)):
            chosen = model(input_ids, logits_to_keep=choice, cache=cache).logits
            torch.testing.assert_close(chosen, expected[:, positions], **TOLERANCE)


def test_hidden_states_are_whole_whatever_logits_are_kept():
    for model in (asymloop(), fullloop()):
        outputs = model(tokens(1, 7), logits_to_keep=1, output_hidden_states=True)
        assert {states.shape[1] for states in outputs.hidden_states} == {7}
        assert outputs.logits.shape[1] == 1


# Cutting, copying and reordering


@torch.no_grad()
@pytest.mark.parametrize("local_window", WINDOWS)
@pytest.mark.parametrize("removed", [0, 1, 5, 12])
def test_crop(local_window, removed):
    model = asymloop(local_window=local_window)
    input_ids = tokens(2, 12)
    cache = AsymLoopCache(model.config)
    cache.activate_past_recording()
    model(input_ids, cache=cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == 12 - removed
    continuation = tokens(2, 3, seed=1)
    whole = torch.cat([input_ids[:, : 12 - removed], continuation], 1)
    expected = model(whole, use_cache=False).logits[:, -3:]
    torch.testing.assert_close(model(continuation, cache=cache).logits, expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("removed", [1, 4, 9])
def test_crop_reaches_pending_positions_first(removed):
    model = asymloop()
    input_ids = tokens(2, 12)
    cache = AsymLoopCache(model.config)
    model(input_ids[:, :8], cache=cache)
    model.encode(input_ids[:, 8:], cache=cache)
    cache.crop(-removed)
    continuation = tokens(2, 3, seed=1)
    whole = torch.cat([input_ids[:, : 12 - removed], continuation], 1)
    expected = model(whole, use_cache=False).logits[:, -3:]
    torch.testing.assert_close(model(continuation, cache=cache).logits, expected, **TOLERANCE)


def test_crop_refuses_what_it_cannot_do():
    model = asymloop(local_window=2)
    cache = AsymLoopCache(model.config)
    model(tokens(1, 30), cache=cache, logits_to_keep=2)
    for wrong in (3, -31):
        with pytest.raises(ValueError, match=f"tokens_to_remove={wrong} is not allowed: it must be from -30 to 0"):
            cache.crop(wrong)
    with pytest.raises(ValueError, match="tokens_to_remove=-3 is not allowed: it must be 0: the window has moved on"):
        cache.crop(-3)
    assert cache.get_seq_length() == 30
    cache.activate_past_recording()
    model(tokens(1, 6, seed=1), cache=cache)
    with pytest.raises(ValueError, match="tokens_to_remove=-7 .* the window has moved on"):
        cache.crop(-7)
    cache.crop(-6)
    cache.crop(-30)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_crop_of_a_full_window_is_refused_before_anything_is_cut():
    model = asymloop(local_window=3)
    input_ids = tokens(1, 24)
    cache = AsymLoopCache(model.config)
    model(input_ids[:, :20], cache=cache)
    with pytest.raises(
        ValueError, match="tokens_to_remove=-2 .* the window has moved on; call `activate_past_recording"
    ):
        cache.crop(-2)
    logits = model(input_ids[:, 20:], cache=cache).logits
    torch.testing.assert_close(logits, model(input_ids).logits[:, 20:], **TOLERANCE)
    model.encode(tokens(1, 5), cache=cache)
    cache.crop(-5)  # pending positions have no local KV that could be missed
    assert cache.get_seq_length() == 24


@torch.no_grad()
def test_crop_with_recording_cuts_what_was_recorded_since_the_last_crop():
    model = asymloop(local_window=4)
    input_ids = tokens(1, 16)
    cache = AsymLoopCache(model.config)
    cache.activate_past_recording()
    model(input_ids[:, :12], cache=cache)
    cache.crop(-1)
    with pytest.raises(ValueError, match="tokens_to_remove=-1 .* the window has moved on"):
        cache.crop(-1)
    logits = model(input_ids[:, 11:], cache=cache).logits
    torch.testing.assert_close(logits, model(input_ids).logits[:, 11:], **TOLERANCE)


@torch.no_grad()
def test_a_refused_forward_leaves_the_cache_as_it_was():
    model = asymloop(local_window=4)
    input_ids = tokens(1, 25)
    cache = AsymLoopCache(model.config)
    model(input_ids[:, :5], cache=cache)
    for wrong in ({"attention_mask": torch.ones(1, 3)}, {"position_ids": torch.arange(3)[None]}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.shape=\\(1, 3\\) is not allowed: it must be"):
            model(input_ids[:, 5:], cache=cache, logits_to_keep=1, **wrong)
    logits = model(input_ids[:, 5:9], cache=cache).logits
    torch.testing.assert_close(logits, model(input_ids[:, :9]).logits[:, 5:], **TOLERANCE)


@torch.no_grad()
def test_crop_of_a_fork_stops_where_its_local_kv_would_be_missed():
    model = asymloop(local_window=2, num_decoder_layers=1, num_loops=2)  # local KV reaches 2 positions back
    input_ids = tokens(1, 28)
    cache = AsymLoopCache(model.config)
    model(input_ids[:, :20], cache=cache)
    model.encode(input_ids[:, 20:26], cache=cache)
    fork = cache.fork()
    with pytest.raises(ValueError, match="tokens_to_remove=-5 is not allowed: it must be at least -4"):
        fork.crop(-5)
    fork.crop(-4)
    expected = model(input_ids[:, :24], use_cache=False).logits[:, 22:]
    torch.testing.assert_close(model(input_ids[:, 22:24], cache=fork).logits, expected, **TOLERANCE)


@torch.no_grad()
def test_past_recording_outlives_fork_and_reset():
    model = asymloop(local_window=3)
    input_ids = tokens(1, 30)
    cache = AsymLoopCache(model.config)
    cache.activate_past_recording()
    cache.reset()
    model.encode(input_ids[:, :20], cache=cache)
    fork = cache.fork()
    model(input_ids[:, 20:27], cache=fork, logits_to_keep=1)
    fork.crop(-7)
    expected = model(input_ids, use_cache=False).logits[:, 20:]
    torch.testing.assert_close(model(input_ids[:, 20:], cache=fork).logits, expected, **TOLERANCE)


# What is done to a cache of three sequences, and which of them are left.
OPERATIONS = {
    "shallow copy": (copy.copy, [0, 1, 2]),
    "deep copy": (copy.deepcopy, [0, 1, 2]),
    "pickle": (lambda cache: pickle.loads(pickle.dumps(cache)), [0, 1, 2]),
    "reorder_cache": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "crop": (lambda cache: cache.crop(-2), [0, 1, 2]),
}
FILLED = {
    "asymloop": (lambda: asymloop(), "asymloop"),
    "asymloop, window of 3": (lambda: asymloop(local_window=3), "asymloop"),
    "asymloop, encoded": (lambda: asymloop(local_window=3), "encoded"),
    "asymloop, dynamic": (lambda: asymloop(), "dynamic"),
    "asymloop, static": (lambda: asymloop(), "static"),
    "full loop, dynamic": (lambda: fullloop(), "dynamic"),
    "full loop, static": (lambda: fullloop(), "static"),
}


@torch.no_grad()
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("filled", FILLED)
def test_operations_on_a_cache(filled, operation):
    if filled.endswith("static") and operation.startswith(("batch", "crop")) and not hasattr(StaticLayer, operation):
        pytest.skip(f"Transformers' static cache has no `{operation}`")
    (new_model, kind), (change, rows) = FILLED[filled], OPERATIONS[operation]
    model, input_ids = new_model(), tokens(3, 6)
    if kind == "encoded":
        cache = model.encode(input_ids)
    else:
        cache = new_cache(kind, model.config)
        cache.activate_past_recording()
        model(input_ids, **{CACHE_NAME: cache})
    cache = change(cache) or cache
    kept = input_ids[rows, :-2] if operation == "crop" else input_ids[rows]
    for new in tokens(len(rows), 2, seed=1).split(1, dim=1):
        kept = torch.cat([kept, new], 1)
        logits = model(new, **{CACHE_NAME: cache}).logits
        torch.testing.assert_close(logits, model(kept, use_cache=False).logits[:, -1:], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("operation", ["deep copy", "pickle"])
@pytest.mark.parametrize("filled", FILLED)
def test_a_copy_of_a_cache_is_independent(filled, operation):
    (new_model, kind), (duplicate, _) = FILLED[filled], OPERATIONS[operation]
    model, input_ids = new_model(), tokens(3, 6)
    cache = model.encode(input_ids) if kind == "encoded" else new_cache(kind, model.config)
    if kind != "encoded":
        model(input_ids, **{CACHE_NAME: cache})
    caches, continuations = (cache, duplicate(cache)), (tokens(3, 3, seed=1), tokens(3, 3, seed=2))
    for i in range(3):
        for one, continuation in zip(caches, continuations, strict=True):
            logits = model(continuation[:, i : i + 1], **{CACHE_NAME: one}).logits
            whole = torch.cat([input_ids, continuation[:, : i + 1]], 1)
            torch.testing.assert_close(logits, model(whole, use_cache=False).logits[:, -1:], **TOLERANCE)


def test_reset_empties_the_cache():
    model = asymloop(local_window=3)
    input_ids = tokens(1, 6)
    cache = model.encode(input_ids)
    cache.reset()
    assert cache.get_seq_length() == cache.num_pending == 0
    logits = model(input_ids, cache=cache).logits
    torch.testing.assert_close(logits, model(input_ids).logits, **TOLERANCE)


# One local slot for all loops


@torch.no_grad()
@pytest.mark.parametrize("local_window", WINDOWS)
def test_last_loop_keeps_one_local_slot_for_each_decoder_layer(local_window):
    model = asymloop(local_window=local_window)
    input_ids = tokens(2, 12)
    exact, lean = AsymLoopCache(model.config), AsymLoopCache(model.config, local_kv="last_loop")
    assert len(exact) == 2 + 3 * 2 and len(lean) == 2 + 2
    for cache in (exact, lean):
        prompt_logits = model(input_ids[:, :9], cache=cache).logits
        torch.testing.assert_close(prompt_logits, model(input_ids[:, :9]).logits, **TOLERANCE)
    if local_window != 1:
        assert torch.equal(lean.layers[-1].keys, exact.layers[-1].keys)
    step = model(input_ids[:, 9:10], cache=lean).logits
    expected = model(input_ids[:, :10]).logits[:, 9:]
    assert step.shape == expected.shape
    if local_window == 1:  # nothing is kept, so nothing is lost
        torch.testing.assert_close(step, expected, **TOLERANCE)
    else:
        assert not torch.allclose(step, expected)


@torch.no_grad()
def test_last_loop_is_exact_with_one_loop():
    model = asymloop(num_loops=1, local_window=3)
    input_ids = tokens(2, 12)
    logits = run_in_chunks(model, input_ids, (4, 1, 7), AsymLoopCache(model.config, local_kv="last_loop"))
    torch.testing.assert_close(logits, model(input_ids).logits, **TOLERANCE)


# Caches that do not fit


@pytest.mark.parametrize("num_loops", [0, -1, 2.5, "3"])
def test_the_loops_of_a_cache_are_a_positive_integer(num_loops):
    with pytest.raises(ValueError, match="num_loops=.* is not allowed: it must be a positive integer"):
        AsymLoopCache(asymloop_config(), num_loops=num_loops)
    with pytest.raises(ValueError, match="num_loops=.* is not allowed: it must be a positive integer"):
        asymloop().encode(tokens(1, 3)).fork(num_loops=num_loops)


def test_a_cache_for_other_layers_loops_or_windows_is_refused():
    model = asymloop(num_encoder_layers=2, num_decoder_layers=2, num_loops=3)
    input_ids = tokens(1, 3)
    with pytest.raises(ValueError, match="num_loops=2 is not allowed: it must be 3, as the cache was made"):
        model(input_ids, cache=AsymLoopCache(model.config), num_loops=2)
    for field, value in (("num_encoder_layers", 3), ("num_decoder_layers", 1), ("local_window", 4)):
        cache = AsymLoopCache(asymloop_config(**{field: value}))
        with pytest.raises(
            ValueError, match=f"cache.config.{field}={value} is not allowed: it must be .*, as in the model"
        ):
            model(input_ids, cache=cache)
        with pytest.raises(ValueError, match=f"cache.config.{field}={value} is not allowed"):
            model.encode(input_ids, cache=cache)
    for cache in (DynamicCache(config=asymloop_config(num_loops=2)), StaticCache(asymloop_config(num_loops=2), 9)):
        with pytest.raises(ValueError, match=r"cache=.* it must be made for 8 visits \(it has 6 slots\)"):
            model(input_ids, cache=cache)
    with pytest.raises(ValueError, match="cache=DynamicCache.* it must be an `AsymLoopCache` or None"):
        model.encode(input_ids, cache=DynamicCache())
    for other in (((input_ids, input_ids),), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        for use in (model, model.generate):
            with pytest.raises(ValueError, match="cache='.*' .* a Transformers `Cache` of a decoder or None"):
                use(input_ids, cache=other)
    with pytest.raises(ValueError, match="local_kv='first_loop' is not allowed"):
        AsymLoopCache(model.config, local_kv="first_loop")


def test_both_names_of_the_cache_argument_work():
    model = asymloop()
    input_ids = tokens(1, 5)
    for name in ("cache", "past_key_values"):
        cache = AsymLoopCache(model.config)
        model(input_ids, **{name: cache})
        assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="past_key_values=.* it must be None, or the same, where `cache` is given"):
        model(input_ids, cache=cache, past_key_values=AsymLoopCache(model.config))


def test_a_window_needs_a_mask_for_each_kind_of_slot():
    model = asymloop(local_window=3)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="attention_mask of 4 dimensions .* one mask for 'full_attention'"):
        model(tokens(1, 5), attention_mask=mask)
    masks = {"full_attention": mask, "sliding_attention": mask & mask.new_ones(5, 5).triu(-2)}
    for attn_implementation in ("sdpa", "eager"):
        model.set_attn_implementation(attn_implementation)
        logits = model(tokens(1, 5), attention_mask=masks).logits
        torch.testing.assert_close(logits, model(tokens(1, 5)).logits, **TOLERANCE)
    with pytest.raises(ValueError, match="attention_mask=.* a dictionary with .*_attention and .*_attention"):
        model(tokens(1, 5), attention_mask={"full_attention": mask})


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 12, 12).tril().bool(), torch.ones(1, 4, 12, 12).tril().long()])
def test_ready_masks_with_lazy_prefill(mask):
    model, input_ids = asymloop(local_window=1), tokens(1, 12)
    cache = AsymLoopCache(model.config)
    logits = model(input_ids, attention_mask=mask, cache=cache, logits_to_keep=2).logits
    torch.testing.assert_close(logits, model(input_ids).logits[:, -2:], **TOLERANCE)


def test_ready_masks_of_a_window_with_lazy_prefill():
    model, input_ids = asymloop(local_window=3), tokens(1, 40)
    full = torch.ones(1, 1, 40, 40).tril().bool()
    masks = {"full_attention": full, "sliding_attention": full & ~full.tril(-3)}
    cache = AsymLoopCache(model.config)
    logits = model(input_ids, attention_mask=masks, cache=cache, logits_to_keep=1).logits
    torch.testing.assert_close(logits, model(input_ids).logits[:, -1:], **TOLERANCE)


def test_masks_of_another_size_are_refused():
    model, input_ids = asymloop(), tokens(1, 12)
    for shape in ((1, 13), (1, 11), (2, 12), (1, 1, 12)):
        mask = torch.ones(shape, dtype=torch.long)
        with pytest.raises(ValueError, match=r"attention_mask.shape=.* is not allowed: it must be \(1, 12\)"):
            model(input_ids, attention_mask=mask)
    cache = model.encode(input_ids[:, :8])
    with pytest.raises(ValueError, match=r"attention_mask.shape\[-2\]=4 is not allowed: it must be 12"):
        model(input_ids[:, 8:], attention_mask=torch.ones(1, 1, 4, 12).bool(), cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(1, 4\) is not allowed: it must be \(1, 5\)"):
        model.encode(input_ids[:, :5], torch.ones(1, 4))


def test_encode_takes_both_names_of_the_cache():
    model, input_ids = asymloop(), tokens(1, 6)
    for name in ("cache", "past_key_values"):
        cache = model.encode(input_ids[:, :4])
        assert model.encode(input_ids[:, 4:], **{name: cache}) is cache
        assert cache.num_pending == 6


def test_encode_refuses_what_it_would_get_wrong():
    model, input_ids = asymloop(), tokens(1, 6)
    with pytest.raises(ValueError, match="num_loops=5 is not allowed: it must be left to `fork`"):
        model.encode(input_ids, num_loops=5)
    with pytest.raises(ValueError, match="position_ids must rise by one: packed documents cannot share a cache"):
        model.encode(input_ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="Gradient checkpointing fills no cache: call `eval\\(\\)` before `encode`"):
        model.encode(input_ids)
