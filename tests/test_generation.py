"""`generate`: depths, drafts, encoded prompts, conversations. Methods and caches are in test_generation_matrix.py."""

import pytest
import torch
from conftest import BACKBONES, asymloop, fullloop, tokens
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from asymloop_hf import AsymLoopCache
from asymloop_hf.modeling.modeling_looped import CACHE_NAME

pytestmark = pytest.mark.usefixtures("float64")

MODELS = {
    "asymloop": lambda: asymloop(),
    "asymloop, window of 1": lambda: asymloop(local_window=1),
    "asymloop, window of 3": lambda: asymloop(local_window=3),
    "full loop": lambda: fullloop(),
    "olmo2, window of 3": lambda: asymloop(local_window=3, **BACKBONES["olmo2"]),
    "olmoe": lambda: asymloop(**BACKBONES["olmoe"]),
}


def prompts(padding_side: str) -> dict[str, torch.Tensor]:
    short, long = tokens(1, 14), tokens(1, 20, seed=1)
    padding = torch.zeros(1, 6, dtype=torch.long)
    row = torch.cat([padding, short] if padding_side == "left" else [short, padding], 1)
    input_ids = torch.cat([row, long])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


def generate(model, seed=0, **options):
    torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": 8, "disable_compile": True, **options}
    outputs = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    return outputs.sequences, torch.stack(outputs.logits) if outputs.logits else torch.zeros(0)


def assert_same(generated, expected):
    assert generated[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(generated[1], expected[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_read_in_chunks(name, padding_side):
    model, inputs = MODELS[name](), prompts(padding_side)
    assert_same(generate(model, **inputs, prefill_chunk_size=6), generate(model, **inputs, use_cache=False))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_as_each_prompt_alone(name):
    model, inputs = MODELS[name](), prompts("left")
    sequences, _ = generate(model, **inputs)
    for i, length in enumerate((14, 20)):
        alone, _ = generate(model, input_ids=inputs["input_ids"][i : i + 1, -length:])
        assert sequences[i, -length - 8 :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("num_new_tokens", [1, 12])
@pytest.mark.parametrize("name", MODELS)
def test_a_full_loop_as_the_assistant(name, num_new_tokens):
    model, input_ids = MODELS[name](), tokens(1, 6).repeat(1, 4)
    expected = generate(model, input_ids=input_ids, max_new_tokens=num_new_tokens, use_cache=False)
    assisted = generate(model, input_ids=input_ids, max_new_tokens=num_new_tokens, assistant_model=fullloop())
    assert assisted[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_prompt_lookup_may_draft_beyond_the_last_position_of_a_static_cache(name):
    if CACHE_NAME != "cache":
        pytest.skip("Transformers 5.18 has no assisted decoding with a static cache")
    if "window of 3" in name:
        pytest.skip("a static cache with a window cannot be cut back: test_generation_matrix.py")
    model, input_ids = MODELS[name](), torch.cat([tokens(1, 9), torch.full((1, 9), 5)], 1)
    options = {"cache_implementation": "static", "prompt_lookup_num_tokens": 6, "max_new_tokens": 4}
    expected, _ = generate(model, input_ids=input_ids, max_new_tokens=4, use_cache=False)
    assert generate(model, input_ids=input_ids, **options)[0].tolist() == expected.tolist()


def test_a_draft_that_is_always_right_is_accepted():
    model = asymloop(local_window=3)
    calls = []
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(1), with_kwargs=True)
    draft = asymloop(local_window=3)
    draft.load_state_dict(model.state_dict())
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    sequences, _ = generate(model, input_ids=tokens(1, 24), max_new_tokens=10, assistant_model=draft)
    assert sequences.shape[1] == 34
    assert len(calls) == 2  # 4 drafted tokens and one of the model's own in each call


@pytest.mark.parametrize("num_loops", [1, 2, 5])
@pytest.mark.parametrize("local_window", [None, 1, 3])
def test_more_and_fewer_loops_than_trained(num_loops, local_window):
    model = asymloop(local_window=local_window)
    other = asymloop(local_window=local_window, num_loops=num_loops)
    other.load_state_dict(model.state_dict())
    input_ids = tokens(2, 20)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}):
        expected = generate(other, input_ids=input_ids, **options)
        assert_same(generate(model, input_ids=input_ids, num_loops=num_loops, **options), expected)
    assert model.config.num_loops == 3


@pytest.mark.parametrize("num_loops", [0, -1, 1.5])
@pytest.mark.parametrize("name", MODELS)
def test_num_loops_must_be_a_positive_integer(name, num_loops):
    with pytest.raises(ValueError, match=f"num_loops={num_loops} is not allowed: it must be a positive integer"):
        MODELS[name]().generate(tokens(1, 3), num_loops=num_loops, max_new_tokens=2)


@pytest.mark.parametrize("local_window", [None, 1, 3])
def test_generating_from_an_encoded_prompt_at_several_depths(local_window):
    model = asymloop(local_window=local_window)
    input_ids = tokens(2, 20)
    encoded = model.encode(input_ids[:, :-1])
    for num_loops in (1, 4):
        expected = generate(model, input_ids=input_ids, num_loops=num_loops, use_cache=False)
        assert_same(generate(model, input_ids=input_ids, **{CACHE_NAME: encoded.fork(num_loops)}), expected)


CACHES = {
    "default": lambda model: AsymLoopCache(model.config) if hasattr(model, "encode") else DynamicCache(),
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=50),
}


@pytest.mark.parametrize("gives", ["the whole conversation", "the new tokens"])
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_goes_on_with_one_cache(name, cache_kind, gives):
    model, inputs = MODELS[name](), prompts("left")
    cache = CACHES[cache_kind](model)
    given, conversation, attention_mask = inputs["input_ids"], inputs["input_ids"], inputs["attention_mask"]
    for turn in range(3):
        options = {"attention_mask": attention_mask, "max_new_tokens": 3}
        answer = generate(model, input_ids=given, **{CACHE_NAME: cache}, **options)[0][:, -3:]
        expected = generate(model, input_ids=conversation, use_cache=False, **options)[0]
        assert answer.tolist() == expected[:, -3:].tolist()
        assert cache.get_seq_length() == expected.shape[1] - 1
        question = tokens(2, 4, seed=turn)
        conversation = torch.cat([expected, question], 1)
        attention_mask = torch.cat([attention_mask, torch.ones(2, 7, dtype=torch.long)], 1)
        # The last token of an answer has not been read yet.
        given = conversation if gives == "the whole conversation" else conversation[:, -5:]


@pytest.mark.parametrize("name", MODELS)
def test_a_filled_cache_that_would_have_the_prompt_read_twice_is_refused(name):
    model, input_ids = MODELS[name](), tokens(1, 6)
    cache = DynamicCache()
    model(input_ids, cache=cache)
    for cache_name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match="cache is not allowed: it holds all 6 tokens of the prompt"):
            model.generate(input_ids, **{cache_name: cache}, max_new_tokens=3)
        with pytest.raises(
            ValueError, match="cache of 6 tokens is not allowed: it must be empty in assisted decoding"
        ):
            model.generate(tokens(1, 9), **{cache_name: cache}, prompt_lookup_num_tokens=2, max_new_tokens=3)


@pytest.mark.parametrize("name", MODELS)
def test_continuous_batching_is_refused(name):
    with pytest.raises(ValueError, match="cache_implementation='paged' is not allowed"):
        MODELS[name]().generate(tokens(1, 6), cache_implementation="paged", max_new_tokens=3)


def test_last_loop_local_kv():
    model = asymloop()
    cache = AsymLoopCache(model.config, local_kv="last_loop")
    sequences, _ = generate(model, input_ids=tokens(2, 9), **{CACHE_NAME: cache})
    assert sequences.shape == (2, 17)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [16] * 4


def test_lazy_prefill_is_what_generate_does():
    model = asymloop(local_window=2)
    visited = []
    model.model.decoder.register_forward_pre_hook(lambda module, args: visited.append(len(args[0])))
    generate(model, input_ids=tokens(1, 60), max_new_tokens=3)
    assert visited == [3 * 2 * 1 + 1, 1, 1]


def test_after_loading_through_the_auto_class(tmp_path):
    model, input_ids = asymloop(local_window=3), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_same(generate(loaded, input_ids=input_ids), generate(model, input_ids=input_ids))
