"""PEFT: adapters on encoder, decoder or both, on experts, and prompts; merging, saving and generating with them."""

import copy

import pytest
import torch
from conftest import BACKBONES, KINDS, asymloop, fullloop, tokens
from test_saving import run_without_the_package
from transformers import DynamicCache

from asymloop_hf.modeling.modeling_looped import CACHE_NAME

peft = pytest.importorskip("peft")

STACKS = {"encoder": r".*\.encoder\..*", "decoder": r".*\.decoder\..*"}
every_model = pytest.mark.parametrize("name", KINDS)


def with_adapter(model, **options):
    """The model with a LoRA adapter that does something from the start."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()


def train_once(model):
    """The names of the weights that get a gradient."""
    model.train()(input_ids=tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    return {name for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "v_proj"]])
@every_model
def test_an_adapter_is_a_low_rank_change_of_the_weights(name, target_modules, float64):
    base = KINDS[name]()
    by_hand = copy.deepcopy(base)
    model = with_adapter(base, target_modules=target_modules)
    for path, module in model.base_model.model.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            low_rank = module.lora_B["default"].weight @ module.lora_A["default"].weight
            by_hand.get_submodule(path).weight.data += 8 / 4 * low_rank
    input_ids = tokens(2, 9)
    logits = model(input_ids=input_ids).logits.detach()
    torch.testing.assert_close(logits, by_hand(input_ids).logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(logits, model.merge_and_unload()(input_ids).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("asymloop")])
def test_an_adapter_on_one_stack_leaves_the_other_alone(name, stack):
    model = with_adapter(KINDS[name](), target_modules=rf"{STACKS[stack]}(q|k|v|o)_proj")
    trained = train_once(model)
    assert len(trained) == 2 * 4 * 2  # layers, projections, matrices
    assert all(f".{stack}." in weight and ".lora_" in weight for weight in trained)


@every_model
def test_an_adapter_can_be_switched_off_and_unloaded(name):
    base = KINDS[name]()
    expected = base(tokens(2, 9)).logits
    model = with_adapter(base)
    assert not torch.allclose(model(input_ids=tokens(2, 9)).logits, expected)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=tokens(2, 9)).logits, expected)
    assert torch.equal(model.unload()(tokens(2, 9)).logits, expected)


@pytest.mark.parametrize("num_loops", [1, 4])
@every_model
def test_generate_with_an_adapter(name, num_loops):
    model = with_adapter(KINDS[name]())
    options = {"max_new_tokens": 6, "do_sample": False, "num_loops": num_loops}
    generated = model.generate(input_ids=tokens(2, 9), **options)
    assert torch.equal(generated, model.generate(input_ids=tokens(2, 9), use_cache=False, **options))
    assert torch.equal(generated, model.merge_and_unload().generate(tokens(2, 9), **options))


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {}),
        (True, {}),
        (False, {"modules_to_save": ["lm_head"]}),
        (False, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ],
    ids=["untied", "tied", "with the whole head", "on embeddings and head"],
)
@every_model
def test_an_adapter_is_saved_and_loaded(name, tied, options, tmp_path):
    KINDS[name](tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    base_class = type(KINDS[name]())
    model = with_adapter(base_class.from_pretrained(tmp_path / "base"), **options)
    model.save_pretrained(tmp_path / "adapter")
    expected = model(input_ids=tokens(2, 9)).logits
    onto_base = peft.PeftModel.from_pretrained(base_class.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(onto_base(input_ids=tokens(2, 9)).logits, expected)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(loaded(input_ids=tokens(2, 9)).logits, expected)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = base_class.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(tokens(2, 9)).logits, expected, rtol=0, atol=1e-5)


def test_an_adapter_on_a_model_from_the_files_beside_its_checkpoint(tmp_path):
    asymloop().save_pretrained(tmp_path / "base")
    code = f"""
import peft, torch, transformers
load = lambda: transformers.AutoModelForCausalLM.from_pretrained("base", trust_remote_code=True).eval()
options = dict(target_modules="all-linear", init_lora_weights=False)
model = peft.get_peft_model(load(), peft.LoraConfig(task_type="CAUSAL_LM", **options))
model.save_pretrained("adapter")
input_ids = torch.tensor({tokens(2, 7).tolist()})
loaded = peft.PeftModel.from_pretrained(load(), "adapter").merge_and_unload()
print((model.eval()(input_ids=input_ids).logits - loaded(input_ids).logits).abs().max() < 1e-5)
"""
    assert run_without_the_package(code, tmp_path).splitlines()[-1] == "tensor(True)"


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_model
def test_gradient_checkpointing_with_an_adapter(name, use_reentrant):
    model = with_adapter(KINDS[name]()).train()
    trained = train_once(model)
    expected = {key: weight.grad.clone() for key, weight in model.named_parameters() if key in trained}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert train_once(model) == trained
    for key, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(key).grad, gradient)


@pytest.mark.parametrize("make", [asymloop, fullloop])
def test_an_adapter_on_experts(make):
    base = make(**BACKBONES["olmoe"])
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = with_adapter(base, target_modules=[], target_parameters=experts)
    trained = train_once(model)
    assert trained and all(".mlp.experts." in weight and ".lora_" in weight for weight in trained)
    logits = model.eval()(input_ids=tokens(2, 9)).logits.detach()
    torch.testing.assert_close(model.merge_and_unload()(tokens(2, 9)).logits, logits, rtol=0, atol=1e-5)


@every_model
def test_prompt_tuning_puts_its_embeddings_first(name):
    """PEFT 0.21 does not see the cache of Transformers 5.24, and would put them before every new token again."""
    model = KINDS[name]()
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    prompted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    prompt = prompted.prompt_encoder["default"].embedding.weight.expand(2, -1, -1)
    embeddings = torch.cat([prompt, model.get_input_embeddings()(tokens(2, 9))], dim=1)
    expected = model(inputs_embeds=embeddings).logits
    torch.testing.assert_close(prompted(input_ids=tokens(2, 9)).logits, expected)
    generated = prompted.generate(input_ids=tokens(2, 9), **options)
    assert torch.equal(generated[:, 9:], model.generate(inputs_embeds=embeddings, **options))
    assert train_once(prompted) == {"prompt_encoder.default.embedding.weight"}


def prefix_tuned(model, prefix):
    """The model, tuned to a prefix that is what it makes of some tokens."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=prefix.shape[1])
    tuned = peft.get_peft_model(model, config).eval()
    cache = DynamicCache()
    model(prefix, **{CACHE_NAME: cache})
    key_values = [kind[0].transpose(0, 1).flatten(1) for layer in cache.layers for kind in (layer.keys, layer.values)]
    tuned.prompt_encoder["default"].embedding.weight.data = torch.cat(key_values, dim=1).detach()
    return tuned


@every_model
def test_prefix_tuning_gives_each_visit_its_key_values(name):
    model, prefix, input_ids = KINDS[name](), tokens(1, 3, seed=1), tokens(2, 9)
    expected = model(torch.cat([prefix.expand(2, -1), input_ids], dim=1)).logits[:, 3:]
    tuned = prefix_tuned(model, prefix)
    torch.testing.assert_close(tuned(input_ids=input_ids).logits, expected, rtol=0, atol=1e-5)
    assert train_once(tuned) == {"prompt_encoder.default.embedding.weight"}


@pytest.mark.skipif(CACHE_NAME != "cache", reason="before 5.24 the prefix takes the place of the empty cache")
@every_model
def test_a_prefix_is_not_lost_in_generate(name):
    """PEFT hands the prefix over under the old name, beside the new one; a Llama of 5.24 generates without it."""
    tuned = prefix_tuned(KINDS[name](), tokens(1, 3))
    with pytest.raises(ValueError, match="past_key_values=.* it must be None, or the same, where `cache` is given"):
        tuned.generate(input_ids=tokens(2, 9), max_new_tokens=2)


def test_target_modules_must_be_named():
    """PEFT has defaults for the models that it knows; for others it asks for names, or "all-linear"."""
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(asymloop(), peft.LoraConfig(task_type="CAUSAL_LM"))
