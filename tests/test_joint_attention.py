"""The operator of joint attention: one softmax over two sources, whatever is hidden, exact to rounding."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asymloop_hf.modeling import joint_attention as engine
from asymloop_hf.modeling.joint_attention import joint_attention
from asymloop_hf.modeling.joint_layers import JointKeyValues, eager_joint_attention_forward
from asymloop_hf.modeling.joint_mask import NO_MASK, JointMask

SCALE = 0.3
MASKS = ("causal", "left padding", "right padding", "scattered padding", "packed", "given")


def sees(mask: JointMask, batch: int, row: int, column: int, window: int | None) -> bool:
    """The definition, position by position: whether the query at `row` sees the key at `column` of the sequence."""
    if column > row or (window is not None and column <= row - window):
        return False
    if mask.padding is not None and window != 1 and not mask.padding[batch, column]:
        return False
    return mask.documents is None or bool(mask.documents[batch, row] == mask.documents[batch, column])


def visible(mask: JointMask, query, global_keys, local_keys) -> torch.Tensor:
    """Which of `[global ; local]` each query sees, of shape `(batch, heads, queries, keys)`."""
    batch, heads, num_queries, _ = query.shape
    if mask.global_mask is not None:
        given = (mask.global_mask, mask.local_mask)
        return torch.cat([part.expand(batch, heads, -1, -1) for part in given], -1)
    length = global_keys.shape[2]
    columns = [(None, column) for column in range(length)]
    columns += [(mask.window, column) for column in range(length - local_keys.shape[2], length)]
    rows = range(length - num_queries, length)
    table = [
        [[sees(mask, b, row, column, window) for window, column in columns] for row in rows] for b in range(batch)
    ]
    return torch.tensor(table)[:, None].expand(-1, heads, -1, -1)


def reference(query, global_keys, global_values, local_keys, local_values, mask=NO_MASK, scale=SCALE):
    """The output and the share of the global source, from the definition."""
    groups = query.shape[1] // global_keys.shape[1]
    keys = torch.cat([global_keys, local_keys], 2).repeat_interleave(groups, 1)
    values = torch.cat([global_values, local_values], 2).repeat_interleave(groups, 1)
    seen = visible(mask, query, global_keys, local_keys)
    scores = (query @ keys.mT * scale).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return weights @ values, weights[..., : global_keys.shape[2]].sum(-1)


def make_mask(kind: str, window, batch, heads, num_queries, length, local_length) -> JointMask:
    if kind == "given":
        sizes = ((batch, 1, num_queries, length), (1, heads, num_queries, local_length))
        return JointMask(None, None, None, *(torch.rand(size) < 0.5 for size in sizes))
    starts = torch.randint(0, length, (batch, 1))
    positions = torch.arange(length)
    padding = {
        "left padding": positions >= starts,
        "right padding": positions <= starts,
        "scattered padding": torch.rand(batch, length) < 0.6,
    }.get(kind)
    documents = (torch.rand(batch, length) < 0.2).cumsum(1) if kind == "packed" else None
    return JointMask(window, padding, documents)


@st.composite
def problems(draw, max_length=80, dtype=torch.float64):
    """Tensors of a random problem, and its mask."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(MASKS))
    window = None if kind == "given" else draw(st.one_of(st.none(), st.integers(1, max_length + 5)))
    batch, key_value_heads, groups = (draw(st.integers(1, 2)) for _ in range(3))
    head_dim = draw(st.sampled_from([4, 8, 20]))
    length = draw(st.integers(1, max_length))
    num_queries = length if kind == "packed" else draw(st.integers(1, length))
    local_length = length if kind == "packed" else draw(st.integers(num_queries, length))
    if window == 1:
        local_length = num_queries
    heads = key_value_heads * groups

    def states(num_heads, num_positions):
        return torch.rand(batch, num_positions, num_heads, head_dim, dtype=dtype).transpose(1, 2) * 2 - 1

    lengths = (length, length, local_length, local_length)
    tensors = [states(heads, num_queries), *(states(key_value_heads, n) for n in lengths)]
    return tensors, make_mask(kind, window, batch, heads, num_queries, length, local_length)


def gradients(attend, tensors, mask, grad):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(attend(*tensors, mask, SCALE)[0], tensors, grad)


def assert_near(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


thorough = settings(max_examples=120, deadline=None, derandomize=True)


@given(problem=problems(), return_share=st.booleans())
@thorough
def test_the_operator_is_the_definition(problem, return_share):
    tensors, mask = problem
    output, share = joint_attention(*tensors, mask, SCALE, return_share)
    expected, expected_share = reference(*tensors, mask)
    assert_near(output, expected, 1e-12)
    if return_share:
        assert_near(share, expected_share, 1e-12)
    grad = torch.randn_like(expected)
    for actual, gradient in zip(
        gradients(partial(joint_attention, return_share=return_share), tensors, mask, grad),
        gradients(reference, tensors, mask, grad),
        strict=True,
    ):
        assert_near(actual, gradient, 1e-11)


@given(problem=problems(dtype=torch.float32))
@thorough
def test_the_fused_way_agrees_with_eager(problem):
    tensors, mask = problem
    query, *global_key_values, local_keys, local_values = tensors
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // local_keys.shape[1], training=False)
    sources = JointKeyValues(*global_key_values, cache=None, slot=0, wants_share=True)
    expected, _ = eager_joint_attention_forward(module, query, local_keys, local_values, mask, SCALE, sources=sources)
    output, share = joint_attention(*tensors, mask, SCALE, return_share=True)
    assert_near(output.transpose(1, 2), expected, 1e-6)
    assert_near(share, sources.global_share, 1e-6)


@given(problem=problems())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_other_devices_compute_the_same_with_matrix_products(problem):
    tensors, mask = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CpuFlash", engine.Math)
        output, _ = joint_attention(*tensors, mask, SCALE)
        grad = torch.randn_like(output)
        actual = gradients(joint_attention, tensors, mask, grad)
    assert_near(output, reference(*tensors, mask)[0], 1e-12)
    for gradient, expected in zip(actual, gradients(reference, tensors, mask, grad), strict=True):
        assert_near(gradient, expected, 1e-11)


@given(num_rows=st.integers(1, 150), past=st.integers(0, 60), window=st.one_of(st.none(), st.integers(1, 90)))
@thorough
def test_the_parts_of_a_source_cover_what_is_visible_exactly_once(num_rows, past, window):
    covered = torch.zeros(num_rows, past + num_rows, dtype=torch.long)
    for part in engine.causal_parts(num_rows, past + num_rows, window, torch.zeros(1)):
        rows, columns = (torch.arange(positions.stop)[positions] for positions in (part.rows, part.columns))
        chunk = part.chunk or len(rows)
        chunks = zip(rows.split(chunk), columns.split(part.chunk or len(columns)), strict=True)
        for chunk_rows, chunk_columns in chunks:
            seen = torch.ones(len(chunk_rows), len(chunk_columns), dtype=torch.long)
            seen = seen.tril() if part.causal else seen
            seen = seen if part.mask is None else seen * (part.mask == 0)
            covered[chunk_rows[:, None], chunk_columns] += seen
    distance = torch.arange(past, past + num_rows)[:, None] - torch.arange(past + num_rows)
    expected = (distance >= 0) & (distance < (window or torch.inf))
    assert torch.equal(covered, expected.long())


@pytest.mark.parametrize("window", [1, 16, 64])
def test_the_work_of_a_window_grows_with_length_times_window(window):
    def pairs(length):
        parts = engine.causal_parts(length, length, window, torch.zeros(1))
        return sum((part.rows.stop - part.rows.start) * (part.chunk or window) for part in parts)

    for length in (512, 4096, 32768):
        assert pairs(length) <= 2 * length * max(window, engine.MIN_CHUNK)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("window", [None, 1, 3])
def test_gradients_pass_gradcheck(kind, window):
    local_length = 7
    tensors = [torch.randn(2, 4, 7, 3, dtype=torch.float64)]
    tensors += [torch.randn(2, 2, 7, 3, dtype=torch.float64) for _ in range(4)]
    mask = make_mask(kind, None if kind == "given" else window, 2, 4, 7, 7, local_length)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    attends = (joint_attention, partial(joint_attention, return_share=True))  # one kernel call, or two
    for attend in attends:
        assert torch.autograd.gradcheck(lambda *x, attend=attend: attend(*x, mask, SCALE)[0], tensors)


@pytest.mark.parametrize("length", [384, 500])
def test_long_inputs_take_the_blocked_backward(length):
    tensors = [torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(5)]
    padding = torch.arange(length)[None] >= 200
    grad = torch.randn_like(tensors[0])
    for mask in (NO_MASK, JointMask(padding=padding)):
        for actual, expected in zip(
            gradients(joint_attention, tensors, mask, grad), gradients(reference, tensors, mask, grad), strict=True
        ):
            assert_near(actual, expected, 1e-10)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("length", [9, 130])
def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(window, length):
    tensors = [torch.randn(2, 2, length, 4).requires_grad_() for _ in range(5)]
    padding = torch.ones(2, length, dtype=torch.bool)
    padding[0, :6] = False
    padding[1] = False
    output, share = joint_attention(*tensors, JointMask(window, padding), return_share=True)
    output.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in tensors)
    if window != 1:  # which always sees itself
        assert (output[0, :, :6] == 0).all() and (output[1] == 0).all() and (share[1] == 0).all()
        assert all((tensor.grad[1] == 0).all() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("window", [None, 16])
def test_half_precision(dtype, kind, window):
    length = 230
    tensors = [torch.randn(1, 2, length, 8).to(dtype) for _ in range(5)]
    mask = make_mask(kind, None if kind == "given" else window, 1, 2, length, length, length)
    output, _ = joint_attention(*tensors, mask)
    expected, _ = reference(*(tensor.double() for tensor in tensors), mask, 8**-0.5)
    assert output.dtype == dtype
    assert_near(output.double(), expected, 3 * torch.finfo(dtype).eps)
    grad = torch.randn_like(output)
    expected = gradients(reference, [tensor.double() for tensor in tensors], mask, grad.double())
    for actual, gradient in zip(gradients(joint_attention, tensors, mask, grad), expected, strict=True):
        assert (actual.double() - gradient).norm() <= 4 * torch.finfo(dtype).eps * gradient.norm()


def test_autocast_casts_as_for_other_attention():
    tensors = [torch.randn(1, 2, 9, 4) for _ in range(5)]
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = joint_attention(*tensors)
    expected, _ = joint_attention(*(tensor.bfloat16() for tensor in tensors))
    assert torch.equal(output, expected)


def test_memory_layouts_do_not_matter():
    tensors = [torch.randn(4, 9, 2, 3, dtype=torch.float64).permute(2, 3, 1, 0) for _ in range(5)]
    assert_near(joint_attention(*tensors, scale=SCALE)[0], reference(*tensors)[0], 1e-12)


@pytest.mark.parametrize("kind", ["causal", "left padding", "packed", "given"])
@pytest.mark.parametrize("concatenated", [False, True])
def test_the_operator_is_registered_in_full(kind, concatenated):
    tensors = [torch.randn(2, 2, 7, 4).requires_grad_() for _ in range(5)]
    mask = make_mask(kind, None if kind == "given" else 3, 2, 2, 7, 7, 7)
    torch.library.opcheck(engine._joint_attention, (*tensors, *mask, concatenated, SCALE))


@pytest.mark.parametrize("kind", ["causal", "left padding", "packed"])
def test_compiled_without_a_break(kind):
    torch._dynamo.reset()
    tensors = [torch.randn(2, 2, 40, 4, dtype=torch.float64) for _ in range(5)]
    mask = make_mask(kind, 5, 2, 2, 40, 40, 40)
    attend = torch.compile(joint_attention, fullgraph=True, backend="aot_eager")
    grad = torch.randn_like(tensors[0])
    assert_near(attend(*tensors, mask, SCALE)[0], reference(*tensors, mask)[0], 1e-12)
    for actual, expected in zip(
        gradients(attend, tensors, mask, grad), gradients(reference, tensors, mask, grad), strict=True
    ):
        assert_near(actual, expected, 1e-11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("window, head_dim", [(None, 64), (1, 64), (16, 64), (16, 20)])
def test_cuda(dtype, kind, window, head_dim):
    length = 230
    tensors = [torch.randn(2, heads, length, head_dim).to(dtype) for heads in (4, 2, 2, 2, 2)]
    mask = make_mask(kind, None if kind == "given" else window, 2, 4, length, length, length)
    on_gpu = JointMask(*(part.cuda() if isinstance(part, torch.Tensor) else part for part in mask))
    output, _ = joint_attention(*(tensor.cuda() for tensor in tensors), on_gpu, SCALE)
    wide = [tensor.double() for tensor in tensors]
    tolerance = 4 * max(torch.finfo(dtype).eps, 1e-3 if dtype == torch.float32 else 0)  # TF32 may be on
    assert_near(output.cpu().double(), reference(*wide, mask)[0], tolerance)
    grad = torch.randn_like(tensors[0])
    actual = gradients(joint_attention, [tensor.cuda() for tensor in tensors], on_gpu, grad.cuda())
    for gradient, expected in zip(actual, gradients(reference, wide, mask, grad.double()), strict=True):
        assert (gradient.cpu().double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_decoding_step():
    query = torch.randn(2, 4, 1, 64)
    key_values = [torch.randn(2, 2, 100, 64) for _ in range(4)]
    expected, _ = reference(query, *key_values)
    for dtype in (torch.float32, torch.bfloat16):
        output, _ = joint_attention(*(tensor.to("cuda", dtype) for tensor in (query, *key_values)), scale=SCALE)
        assert_near(output.cpu().float(), expected, 2e-2)


def with_query(query):
    return [query, *(torch.randn(2, 2, 9, 4) for _ in range(4))]


REFUSED = {
    "no query": (with_query(torch.randn(2, 4, 0, 4)), NO_MASK, "query.shape"),
    "heads": (with_query(torch.randn(2, 3, 9, 4)), NO_MASK, "global_keys.shape"),
    "batch": (with_query(torch.randn(1, 4, 9, 4)), NO_MASK, "global_keys.shape"),
    "head size": (with_query(torch.randn(2, 4, 9, 8)), NO_MASK, "global_keys.shape"),
    "more queries than keys": (with_query(torch.randn(2, 4, 10, 4)), NO_MASK, "global_keys.shape"),
    "values": ([torch.randn(2, 2, n, 4) for n in (9, 9, 8, 9, 9)], NO_MASK, "global_values.shape"),
    "local values": ([torch.randn(2, 2, n, 4) for n in (9, 9, 9, 9, 8)], NO_MASK, "local_values.shape"),
    "window": (with_query(torch.randn(2, 4, 9, 4)), JointMask(window=0), "mask.window"),
    "padding": (with_query(torch.randn(2, 4, 9, 4)), JointMask(padding=torch.ones(2, 8) > 0), "mask.padding.shape"),
    "documents": (with_query(torch.randn(2, 4, 9, 4)), JointMask(documents=torch.ones(2, 8)), "mask.documents.shape"),
    "padded documents": (
        with_query(torch.randn(2, 4, 9, 4)),
        JointMask(padding=torch.ones(2, 9) > 0, documents=torch.zeros(2, 9)),
        "mask.padding",
    ),
    "cached documents": (
        with_query(torch.randn(2, 4, 8, 4)),
        JointMask(documents=torch.zeros(2, 8)),
        "global_keys.shape",
    ),
    "ready mask": (
        with_query(torch.randn(2, 4, 9, 4)),
        JointMask(global_mask=torch.ones(3, 1, 9, 9) > 0),
        "mask.global_mask.shape",
    ),
}


@pytest.mark.parametrize("tensors, mask, field", REFUSED.values(), ids=REFUSED)
def test_shapes_that_do_not_fit_are_refused_by_name(tensors, mask, field):
    with pytest.raises(ValueError, match=field):
        joint_attention(*tensors, mask)


def test_autocast_leaves_float64_alone():
    tensors = [torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(5)]
    with torch.autocast("cpu", torch.bfloat16):
        assert joint_attention(*tensors)[0].dtype == torch.float64


def test_shapes_are_known_on_the_meta_device():
    output, share = joint_attention(*(torch.empty(2, 3, 9, 4, device="meta") for _ in range(5)), return_share=True)
    assert output.shape == (2, 3, 9, 4) and share.shape == (2, 3, 9)


def test_additive_masks_of_another_dtype():
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(5)]
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    expected = joint_attention(*tensors, JointMask(global_mask=seen, local_mask=seen))[0]
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        additive = torch.zeros(1, 1, 5, 5).masked_fill(~seen, hidden)
        output, _ = joint_attention(*tensors, JointMask(global_mask=additive, local_mask=additive))
        assert_near(output, expected, 1e-12)
