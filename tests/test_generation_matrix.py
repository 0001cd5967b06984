"""Every decoding method with every cache: what `generate` gives without a cache, or a clear error."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import transformers
from conftest import BACKBONES, SIZES, asymloop, fullloop, tokens
from packaging.version import Version
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import DynamicCache, PreTrainedTokenizerFast, QuantizedCache, cache_utils
from transformers.generation.streamers import BaseStreamer

from asymloop_hf.modeling.modeling_looped import CACHE_NAME

pytestmark = pytest.mark.usefixtures("float64")

IS_OLD = Version(transformers.__version__) < Version("5.24")
SMALL = {"num_encoder_layers": 2, "num_decoder_layers": 1, "num_loops": 2}
MODELS = {
    "asymloop": lambda: asymloop(**SMALL),
    "window of 1": lambda: asymloop(**SMALL, local_window=1),
    "window of 3, olmo2": lambda: asymloop(**SMALL, local_window=3, **BACKBONES["olmo2"]),
    "olmoe": lambda: asymloop(**SMALL, **BACKBONES["olmoe"]),
    "full loop": lambda: fullloop(num_layers=2),
}
CACHES = {
    "default": {},
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"residual_length": 2}},
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded_static": {"cache_implementation": "offloaded_static"},
}


def allowed_after(batch: int, input_ids: torch.Tensor) -> list[int]:
    return [(7 * int(input_ids[-1]) + k) % 96 + 1 for k in range(5)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    characters = Tokenizer(WordLevel({chr(32 + i): i for i in range(SIZES["vocab_size"])}, unk_token=" "))
    characters.pre_tokenizer = Split("", "isolated")
    characters.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters)


def draft():
    torch.manual_seed(1)
    return asymloop(num_encoder_layers=1, num_decoder_layers=1, num_loops=1, local_window=3)


METHODS = {
    "greedy": lambda: {},
    "sampling": lambda: {"do_sample": True},
    "returned sequences": lambda: {"do_sample": True, "num_return_sequences": 3},
    "beams": lambda: {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": lambda: {"do_sample": True, "num_beams": 2},
    "prefixes": lambda: {"prefix_allowed_tokens_fn": allowed_after},
    "stop strings": lambda: {"stop_strings": [chr(32 + i) for i in range(1, 97) if i % 5], "tokenizer": tokenizer()},
    "guidance": lambda: {"guidance_scale": 1.5},
    "streamer": lambda: {"streamer": RecordingStreamer()},
    "embeddings": lambda: {},
    "assisted": lambda: {"assistant_model": draft()},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
}
ASSISTED = ("assisted", "prompt lookup")
# With a window of 1, which has no local slots, a few methods are enough.
CELLS = [
    (name, method)
    for name in MODELS
    for method in METHODS
    if name != "window of 1" or method in ("greedy", "beams", "prompt lookup")
]


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


class LosslessLayer(cache_utils.QuantizedLayer):
    """A quantized slot whose numbers need no rounding."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


@pytest.fixture
def lossless_quantization(monkeypatch):
    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", LosslessLayer)


@pytest.fixture
def offloading(monkeypatch):
    """Offloading without CUDA: streams that do nothing, and an error where a slot is written to before it is back."""

    class Stream(nullcontext):
        def wait_stream(self, other): ...

    def offload(layer):
        layer.is_away = layer.is_initialized

    def prefetch(layer):
        layer.is_away = False

    update = cache_utils.Cache.update

    def update_what_is_back(cache, key_states, value_states, layer_idx, *args, **kwargs):
        is_away = [getattr(layer, "is_away", False) for layer in cache.layers]
        assert True not in is_away[layer_idx : layer_idx + 1], f"slot {layer_idx} is still offloaded"
        return update(cache, key_states, value_states, layer_idx, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(cache_utils.CacheLayerMixin, "offload", offload)
    monkeypatch.setattr(cache_utils.CacheLayerMixin, "prefetch", prefetch)
    monkeypatch.setattr(cache_utils.Cache, "update", update_what_is_back)


def prompts(padding_side: str) -> dict[str, torch.Tensor]:
    short, long = tokens(1, 7).repeat(1, 2), tokens(1, 10, seed=1).repeat(1, 2)
    padding = torch.zeros(1, 6, dtype=torch.long)
    row = torch.cat([padding, short] if padding_side == "left" else [short, padding], 1)
    input_ids = torch.cat([row, long])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


def new_model(name: str):
    torch.manual_seed(0)
    return MODELS[name]()


def run(model, method: str, padding_side: str, **options):
    """The new tokens, and the logits that they were chosen from."""
    inputs = prompts(padding_side)
    if method in (*ASSISTED, "streamer"):
        inputs = {name: tensor[:1] for name, tensor in inputs.items()}
    length = inputs["input_ids"].shape[1]
    if method == "embeddings" and options != {"use_cache": False}:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        length = 0
    options |= METHODS[method]() | {"max_new_tokens": 5, "disable_compile": True, "output_logits": True}
    torch.manual_seed(0)
    outputs = model.generate(**inputs, **{"do_sample": False, **options}, return_dict_in_generate=True)
    if method == "streamer":
        assert options["streamer"].tokens == [*outputs.sequences[0].tolist(), "end"]
    return outputs.sequences[:, length:], torch.stack(outputs.logits)


@functools.cache
def uncached(name: str, method: str, padding_side: str):
    if method in ASSISTED:  # which drafts change neither tokens nor logits
        new_tokens, logits = uncached(name, "greedy", padding_side)
        return new_tokens[:1], logits[:, :1]
    return run(new_model(name), method, padding_side, use_cache=False)


def error(name: str, method: str, cache: str) -> str | None:
    """What Transformers says, or we do, where a combination cannot be."""
    if cache == "quantized" and IS_OLD and (method in ASSISTED or "beam" in method):
        return "cache_implementation='quantized' is not allowed: it must be another with beams or assisted decoding"
    if cache == "quantized" and name == "window of 3, olmo2":
        return "`QuantizedCache` is only supported for models with only full attention layers"
    if cache == "quantized" and method in ASSISTED:
        return "requires a cache that can be cropped"
    if method in ASSISTED and cache in ("static", "offloaded_static"):
        if IS_OLD:
            return "not supported with Static cache classes"
        if name == "window of 3, olmo2":
            return "requires a cache that can be cropped"
    if IS_OLD and method == "assisted" and cache in ("dynamic", "offloaded"):
        return "Passing both `cache_implementation` .* is unsupported"
    return None


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("name", "method"), CELLS)
def test_with_a_cache_as_without(name, method, cache, padding_side, request):
    if "offloaded" in cache:
        request.getfixturevalue("offloading")
    if cache == "quantized":
        request.getfixturevalue("lossless_quantization")
    options = copy.deepcopy(CACHES[cache])  # Transformers 5.18 writes into `cache_config`
    message = error(name, method, cache)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            run(new_model(name), method, padding_side, **options)
        return
    new_tokens, logits = run(new_model(name), method, padding_side, **options)
    expected_tokens, expected_logits = uncached(name, method, padding_side)
    assert new_tokens.tolist() == expected_tokens.tolist()
    # `generate` rounds logits to float32
    torch.testing.assert_close(logits, expected_logits, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache_every_token_follows_from_one_forward_pass(name, padding_side):
    model, inputs = new_model(name), prompts(padding_side)
    new_tokens, _ = uncached(name, "greedy", padding_side)
    input_ids = torch.cat([inputs["input_ids"], new_tokens], 1)
    attention_mask = torch.cat([inputs["attention_mask"], torch.ones_like(new_tokens)], 1)
    positions = (inputs["attention_mask"].cumsum(-1) - 1) * inputs["attention_mask"]
    position_ids = torch.cat([positions, positions[:, -1:] + torch.arange(1, 6)], 1)  # as `generate` counts them
    logits = model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False).logits
    assert logits[:, 19:-1].argmax(-1).tolist() == new_tokens.tolist()


@pytest.mark.parametrize("method", ["prefixes", "stop strings", "guidance"])
@pytest.mark.parametrize("name", MODELS)
def test_methods_that_change_what_is_chosen_do(name, method):
    assert uncached(name, method, "left")[0].tolist() != uncached(name, "greedy", "left")[0].tolist()


@pytest.mark.parametrize("method", ASSISTED)
@pytest.mark.parametrize("name", MODELS)
def test_assisted_decoding_needs_a_cache(name, method):
    with pytest.raises((RuntimeError, ValueError), match="[Aa]ssisted .* requires (a cache|`use_cache=True`)"):
        run(new_model(name), method, "left", use_cache=False)


MOVED = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "dola generation": {"dola_layers": "high"},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained beam search": {"num_beams": 2, "force_words_ids": [[5]]},
}


@pytest.mark.parametrize("method", MOVED)
@pytest.mark.parametrize("name", MODELS)
def test_methods_that_transformers_moved_to_the_hub(name, method):
    with pytest.raises(ValueError, match=f"(?i){method} requires `trust_remote_code=True`"):
        new_model(name).generate(tokens(1, 5), max_new_tokens=2, **MOVED[method])


@pytest.mark.parametrize("name", MODELS)
def test_beams_cannot_be_streamed(name):
    with pytest.raises(ValueError, match="`streamer` cannot be used with beam search"):
        new_model(name).generate(tokens(1, 5), num_beams=2, do_sample=False, streamer=RecordingStreamer())


@pytest.mark.parametrize("method", ASSISTED)
@pytest.mark.parametrize("name", MODELS)
def test_assisted_decoding_takes_one_prompt_and_returns_one_sequence(name, method):
    model, options = new_model(name), METHODS[method]()
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        model.generate(tokens(2, 5), max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        model.generate(tokens(1, 5), max_new_tokens=2, do_sample=True, num_return_sequences=2, **options)


@pytest.mark.parametrize("name", MODELS)
def test_early_exit_is_refused(name):
    with pytest.raises(ValueError, match="assistant_early_exit=2 is not allowed: it must be None; a model with fewer"):
        new_model(name).generate(tokens(1, 5), assistant_early_exit=2, max_new_tokens=2)


@pytest.mark.parametrize("cache_implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("name", MODELS)
def test_offloading_needs_cuda(name, cache_implementation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"cache_implementation='{cache_implementation}' is not allowed: .* CUDA"):
        new_model(name).generate(tokens(1, 5), cache_implementation=cache_implementation, max_new_tokens=2)


@pytest.mark.parametrize("backend", ["quanto", "hqq", "fp8"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "window of 3, olmo2"])
@torch.no_grad()
def test_a_quantized_cache_is_a_cache_of_rounded_numbers(name, backend):
    """The prompt is read exactly; later tokens see its rounded key/values, as if an exact cache held those."""
    if backend == "fp8" and IS_OLD:
        pytest.skip("Transformers 5.18 has no fp8 cache")
    if backend != "fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
    torch.set_default_dtype(torch.float32)
    model, input_ids = new_model(name), tokens(2, 19)
    options = {} if backend == "fp8" else {"q_group_size": 16}
    quantized, exact = QuantizedCache(backend, config=model.config, **options), DynamicCache(config=model.config)
    prompt_logits = model(input_ids[:, :16], **{CACHE_NAME: quantized}).logits
    torch.testing.assert_close(prompt_logits, model(input_ids[:, :16], **{CACHE_NAME: exact}).logits)
    for rounded, layer in zip(quantized.layers, exact.layers, strict=True):
        if layer.is_initialized:
            keys, values = (rounded._dequantize(q) for q in (rounded._quantized_keys, rounded._quantized_values))
            assert 0 < (keys - layer.keys).abs().max() < 0.3 * layer.keys.abs().max()
            layer.keys, layer.values = keys, values
    tolerance = 0.1 if backend == "fp8" else 1e-3  # fp8 rounds new key/values too
    for token in input_ids[:, 16:].split(1, dim=1):
        logits = [model(token, **{CACHE_NAME: cache}).logits for cache in (quantized, exact)]
        torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
@pytest.mark.parametrize("name", MODELS)
def test_a_filled_cache_holds_a_copy_for_each_beam_or_returned_sequence(name, method):
    model, input_ids = new_model(name), tokens(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False, **method}
    cache = DynamicCache() if name == "full loop" else model.encode(input_ids[:, :-1])
    if name == "full loop":
        model(input_ids[:, :-1], **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="cache of 2 sequences is not allowed: it must hold 4, 2 for each of the 2"):
        model.generate(input_ids, **{CACHE_NAME: cache}, **options)
    cache.batch_repeat_interleave(2)
    sequences = []
    for cache_or_none in ({CACHE_NAME: cache}, {"use_cache": False}):
        torch.manual_seed(0)
        sequences.append(model.generate(input_ids, **cache_or_none, **options).tolist())
    assert sequences[0] == sequences[1]
