"""Sparse models: router logits of every visit, the load-balancing loss, Transformers' implementations of experts."""

import pytest
import torch
from conftest import BACKBONES, SPARSE, asymloop, fullloop, tokens
from reference import Reference
from small_corpus import make_documents

from asymloop_hf import AsymLoopCache, AsymLoopConfig
from asymloop_hf.expert_use import expert_use
from asymloop_hf.tokenizer import train_tokenizer

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def balancing_loss(router_logits, num_experts_per_tok, counts=None) -> torch.Tensor:
    """From the definition: the experts times the sum over them of their share of tokens and their mean probability."""
    logits = torch.cat(router_logits)
    counts = torch.ones(len(logits)) if counts is None else counts.repeat(len(router_logits))
    weights = (counts / counts.sum())[:, None]
    probabilities = logits.softmax(-1)
    lowest = probabilities.topk(num_experts_per_tok).values[:, -1:]
    picked = (probabilities >= lowest).to(logits.dtype)
    return logits.shape[-1] * ((picked * weights).sum(0) * (probabilities * weights).sum(0)).sum()


@pytest.mark.parametrize("moe_stacks", [["encoder", "decoder"], ["encoder"], ["decoder"]])
@pytest.mark.parametrize("name", SPARSE)
def test_the_router_logits_are_those_of_each_visit(name, moe_stacks, float64):
    model = asymloop(**BACKBONES[name], moe_stacks=moe_stacks)
    for num_loops in (1, 3):
        outputs = model(tokens(2, 9), num_loops=num_loops, output_router_logits=True)
        reference = Reference(model.config, model.state_dict())
        reference.logits(tokens(2, 9), num_loops=num_loops)
        assert len(outputs.router_logits) == 2 * ("encoder" in moe_stacks) + 2 * num_loops * ("decoder" in moe_stacks)
        for logits, expected in zip(outputs.router_logits, reference.router_logits, strict=True):
            torch.testing.assert_close(logits, expected.flatten(0, 1), **TOLERANCE)


@pytest.mark.parametrize("make", [asymloop, fullloop])
@pytest.mark.parametrize("name", SPARSE)
def test_the_load_balancing_loss_counts_every_visit(name, make):
    model = make(**BACKBONES[name], router_aux_loss_coef=0.3)
    input_ids, per_token = tokens(2, 9), model.config.num_experts_per_tok
    outputs = model(input_ids, labels=input_ids, output_router_logits=True)
    assert len(outputs.router_logits) == model.config.num_hidden_layers
    torch.testing.assert_close(outputs.aux_loss, balancing_loss(outputs.router_logits, per_token))
    plain = model(input_ids, labels=input_ids)
    assert plain.aux_loss is None and plain.router_logits is None
    torch.testing.assert_close(outputs.loss, plain.loss + 0.3 * outputs.aux_loss)
    model.config.output_router_logits = True
    assert torch.equal(model(input_ids, labels=input_ids).loss, outputs.loss)
    assert model(input_ids, output_router_logits=False).aux_loss is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count_for_the_load_balancing_loss(side):
    model, padding = asymloop(**BACKBONES["olmoe"]), torch.zeros(1, 4, dtype=torch.long)
    row = torch.cat([padding, tokens(1, 6)] if side == "left" else [tokens(1, 6), padding], 1)
    input_ids = torch.cat([row, tokens(1, 10, seed=1)])
    attention_mask = (input_ids != 0).long()
    outputs = model(input_ids, attention_mask=attention_mask, output_router_logits=True)
    expected = balancing_loss(outputs.router_logits, 2, attention_mask.flatten().float())
    torch.testing.assert_close(outputs.aux_loss, expected)


@torch.no_grad()
def test_where_visits_have_other_lengths_the_positions_that_all_have_count():
    model, input_ids = asymloop(**BACKBONES["olmoe"], local_window=2, num_loops=1), tokens(2, 12)
    lazy = model(input_ids, cache=AsymLoopCache(model.config), logits_to_keep=1, output_router_logits=True)
    assert [len(logits) // 2 for logits in lazy.router_logits] == [12, 12, 3, 3]
    last = [logits.unflatten(0, (2, -1))[:, -3:].flatten(0, 1) for logits in lazy.router_logits]
    torch.testing.assert_close(lazy.aux_loss, balancing_loss(last, 2))
    mask = torch.ones(2, 12, dtype=torch.long)
    after_encode = model.encode(input_ids[:, :10], mask[:, :10])
    outputs = model(input_ids[:, 10:], mask, cache=after_encode, output_router_logits=True)
    assert [len(logits) // 2 for logits in outputs.router_logits] == [2, 2, 4, 4]
    assert outputs.aux_loss.isfinite()


@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_with_router_logits_and_padding(cache_implementation):
    model = asymloop(**BACKBONES["olmoe"])
    input_ids = torch.cat([torch.tensor([[0, 0, 5]]), tokens(1, 3)])
    options = {"attention_mask": (input_ids != 0).long(), "max_new_tokens": 4, "do_sample": False}
    options |= {"cache_implementation": cache_implementation, "disable_compile": True}
    expected = model.generate(input_ids, **options)
    model.config.output_router_logits = True
    assert model.generate(input_ids, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("make", [asymloop, fullloop])
def test_a_dense_model_has_no_router_logits(make):
    with pytest.raises(ValueError, match="output_router_logits=True .* False with num_experts=0"):
        make()(tokens(1, 3), output_router_logits=True)


@pytest.mark.parametrize("make", [asymloop, fullloop])
@pytest.mark.parametrize("name", SPARSE)
def test_every_implementation_of_experts_gives_the_same(name, make):
    model, input_ids = make(**BACKBONES[name]).train(), tokens(2, 9)
    results = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        model.zero_grad()
        outputs = model(input_ids, labels=input_ids)
        outputs.loss.backward()
        results[implementation] = [outputs.logits, *(parameter.grad for parameter in model.parameters())]
    for implementation in ("batched_mm", "grouped_mm"):
        for result, expected in zip(results[implementation], results["eager"], strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match='experts_implementation="fast"` is not supported'):
        model.set_experts_implementation("fast")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 50}, {"hidden_size": 36, "head_dim": 8}])
@pytest.mark.parametrize("make", [asymloop, fullloop])
def test_the_default_implementation_takes_experts_of_any_size(make, sizes, dtype):
    model = make(num_experts=4, **sizes).to(dtype)
    assert model.config._experts_implementation == ("eager" if sizes else "grouped_mm")
    assert model(tokens(2, 9)).logits.isfinite().all()


@pytest.mark.parametrize("make", [asymloop, fullloop])
def test_checkpoints_keep_the_gradient_of_the_load_balancing_loss_or_are_refused(make, float64):
    model, input_ids = make(**BACKBONES["olmoe"], router_aux_loss_coef=5.0).train(), tokens(2, 9)

    def gradients():
        model.zero_grad()
        model(input_ids, labels=input_ids, output_router_logits=True).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable()
    for gradient, expected_gradient in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="use_reentrant=True is not allowed: it must be False"):
        gradients()


def test_experts_and_routers_start_at_the_initializer_range():
    model = asymloop(num_experts=16, hidden_size=64, initializer_range=0.02)
    for name, weight in model.named_parameters():
        if "experts" in name or "gate.weight" in name:
            torch.testing.assert_close(weight.std().item(), 0.02, rtol=0.1, atol=0)


@pytest.mark.parametrize("make", [lambda config: config, AsymLoopConfig.matched_full_loop])
@pytest.mark.parametrize("name", SPARSE)
def test_a_short_training_leaves_no_expert_unused(name, make):
    documents = make_documents(count=40)
    tokenizer = train_tokenizer(documents, vocab_size=400)
    config = make(asymloop(vocab_size=400, initializer_range=0.02, **BACKBONES[name]).config)
    config.output_router_logits = True
    model = {"asymloop": asymloop, "fullloop": fullloop}[config.model_type](**config.to_diff_dict()).train()
    rows = torch.tensor([tokenizer(document)["input_ids"][:128] for document in documents])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in rows.split(4):
        losses.append(model(batch, labels=batch, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    for routing in expert_use(model.eval(), rows[:8].flatten()).values():
        assert (routing.use > 0).all()
