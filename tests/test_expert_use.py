"""Which experts each loop picks, counted by hand; `asymloop inspect` shows it."""

import json

import pytest
import torch
from conftest import BACKBONES, SPARSE, asymloop, fullloop, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from asymloop_hf.cli import main
from asymloop_hf.expert_use import expert_use, sparse_stacks
from asymloop_hf.tokenizer import train_tokenizer

MODELS = {
    "both stacks": lambda: asymloop(**BACKBONES["olmoe"], max_position_embeddings=16),
    "decoder": lambda: asymloop(**BACKBONES["mixtral"], max_position_embeddings=16, moe_stacks=["decoder"]),
    "encoder": lambda: asymloop(**BACKBONES["mixtral"], max_position_embeddings=16, moe_stacks=["encoder"]),
    "full loop": lambda: fullloop(**BACKBONES["olmoe"], max_position_embeddings=16),
}


def picked_experts(model, input_ids) -> list[list[set]]:
    """The experts of each token in each visit, in blocks of 16 tokens, from what each router returns."""
    visits = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: visits.append(output[2].tolist()))
        for name, module in model.named_modules()
        if name.endswith(".mlp.gate")
    ]
    whole = None
    for block in input_ids.split(16):
        visits.clear()
        model(block[None], use_cache=False)
        whole = whole or [[] for _ in visits]
        for tokens_of_visit, new in zip(whole, visits, strict=True):
            tokens_of_visit.extend(map(set, new))
    for hook in hooks:
        hook.remove()
    return whole


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_use_and_change_are_what_is_counted_by_hand(name):
    model, input_ids = MODELS[name](), tokens(1, 40)[0]
    visits = picked_experts(model, input_ids)
    uses = expert_use(model, input_ids)
    first_slot = 0
    for stack, (loops, layers) in sparse_stacks(model.config).items():
        use, change = uses[stack].use, uses[stack].change
        assert use.shape == (loops, layers, model.config.num_experts) and change.shape == (loops, loops, layers)
        for layer in range(layers):
            of_loop = [visits[first_slot + loop * layers + layer] for loop in range(loops)]
            for loop, picks in enumerate(of_loop):
                counts = [sum(expert in pick for pick in picks) for expert in range(model.config.num_experts)]
                torch.testing.assert_close(use[loop, layer], torch.tensor(counts) / (2 * 40))
                for other, other_picks in enumerate(of_loop):
                    differ = sum(len(now - then) for now, then in zip(picks, other_picks, strict=True))
                    torch.testing.assert_close(change[other, loop, layer].item(), differ / (2 * 40))
        first_slot += loops * layers
    assert first_slot == len(visits)


def test_a_dense_model_and_an_empty_text_are_refused():
    with pytest.raises(ValueError, match="num_experts=0 is not allowed: only a model with experts"):
        expert_use(asymloop(), tokens(1, 4)[0])
    with pytest.raises(ValueError, match=r"input_ids of shape \(0,\)"):
        expert_use(asymloop(**BACKBONES["olmoe"]), tokens(1, 4)[0, :0])


@pytest.mark.parametrize("make", [asymloop, fullloop])
@pytest.mark.parametrize("name", SPARSE)
def test_inspect_prints_and_plots_the_use(name, make, tmp_path, capsys):
    make(vocab_size=300, **BACKBONES[name]).save_pretrained(tmp_path / "model")
    train_tokenizer(["some text for the tokenizer " * 20], vocab_size=300).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("What is read again and again? " * 20)
    plots = [tmp_path / "attention.png", tmp_path / "experts.png"]
    arguments = ["inspect", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    arguments += ["--plot", str(plots[0]), "--expert-plot", str(plots[1])]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "expert use" in table and "layer 1, loop 2" in table and str(plots[1]) in table
    assert plots[1].read_bytes().startswith(b"\x89PNG")
    assert plots[0].exists() == (make is asymloop)  # a Full Loop has no global KV
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = expert_use(model, tokenizer((tmp_path / "text.txt").read_text(), return_tensors="pt")["input_ids"][0])
    assert printed["expert_use"].keys() == expected.keys()
    for stack, routing in expected.items():
        assert printed["expert_use"][stack] == {"use": routing.use.tolist(), "change": routing.change.tolist()}
