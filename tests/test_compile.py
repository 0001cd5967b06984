"""`torch.compile` takes a training step and a step with a static cache as one graph."""

import pytest
import torch
from conftest import BACKBONES, SPARSE, asymloop, fullloop, tokens
from transformers import CompileConfig, StaticCache

SMALL = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_loops": 2}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model):
    return torch.compile(model.forward, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(("name", "local_window"), [("llama", None), *((name, 3) for name in BACKBONES)])
def test_a_training_step_is_one_graph(name, local_window):
    fields = {**BACKBONES[name], "output_router_logits": name in SPARSE}
    model, input_ids = asymloop(**SMALL, local_window=local_window, **fields).train(), tokens(2, 9)
    model.set_experts_implementation("batched_mm")  # Transformers 5.18 cannot compile the gradient of the default
    expected = model(input_ids, labels=input_ids, use_cache=False).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = compiled(model)(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("name", "local_window"), [("llama", None), ("llama", 1), *((name, 3) for name in BACKBONES)])
def test_a_step_with_a_static_cache_is_one_graph(name, local_window):
    model, input_ids = asymloop(**SMALL, local_window=local_window, **BACKBONES[name]), tokens(2, 12)
    cache = StaticCache(model.config, max_cache_len=16)
    model(input_ids[:, :10], cache=cache)
    step = compiled(model)
    logits = [step(input_ids[:, i : i + 1], cache=cache).logits for i in (10, 11)]
    torch.testing.assert_close(torch.cat(logits, 1), model(input_ids).logits[:, 10:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("new_model", "num_graphs"),
    [
        (lambda: asymloop(**SMALL), 1),
        (lambda: asymloop(**SMALL, local_window=3), 2),  # a window that is full is another graph
        (lambda: asymloop(**SMALL, **BACKBONES["olmoe"]), 1),
        (lambda: fullloop(num_layers=1), 1),
    ],
    ids=["asymloop", "window of 3", "olmoe", "full loop"],
)
def test_generate_compiles_the_step_once(new_model, num_graphs):
    model, graphs = new_model(), []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compile_config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compile_config._compile_all_devices = True
    input_ids = tokens(2, 9)
    input_ids[0, :4] = 0
    options = {"attention_mask": (input_ids != 0).long(), "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(input_ids, **options, use_cache=False)
    for _ in range(2):
        generated = model.generate(input_ids, **options, cache_implementation="static", compile_config=compile_config)
        assert generated.tolist() == expected.tolist()
        assert len(graphs) == num_graphs
