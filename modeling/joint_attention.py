"""Joint attention: one softmax over two sources of key/values, the global ones and the local ones.

The fused way, which is exact and builds neither a mask nor a concatenation:

1. attend to each source apart, which gives an output and a log-sum-exp for each;
2. `lse = logaddexp(lse_g, lse_l)` and `out = exp(lse_g - lse) * out_g + exp(lse_l - lse) * out_l`, the merge of
   partial softmaxes of FlashAttention (Dao et al., 2022);
3. backward, call each source's kernel with the *joint* `out` and `lse`: a flash backward recomputes
   `P = exp(q k - lse)` and uses `rowsum(dout * out)`, so what comes out is the gradient of the joint softmax.

A source is itself attended to in parts, merged by the same rule, so that windows, packed documents and queries that
follow cached keys become plain kernel calls too.

Queries have the shape `(batch, heads, queries, head_dim)`, keys and values `(batch, key_value_heads, keys, head_dim)`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .configuration_looped import require
from .joint_mask import NO_MASK, JointMask, additive, band, dense, is_hidden

MIN_CHUNK = 32  # queries of a window that one kernel call takes together, where the window itself is not longer


class Part(NamedTuple):
    """
    One kernel call: some of the queries against some of a source's keys.

    Args:
        rows, columns: the queries and the keys.
        causal: the part's query `i` sees its keys up to `i`.
        mask: additive, broadcast to `(batch, heads, rows, columns)`.
        chunk: rows and columns are cut into chunks of this length, and chunk `n` of the rows sees chunk `n` of the
            columns.
        batch: the sequences.
    """

    rows: slice
    columns: slice
    causal: bool = False
    mask: Tensor | None = None
    chunk: int | None = None
    batch: slice = slice(None)

    @property
    def is_folded(self) -> bool:
        return self.chunk not in (None, 1)

    def take(self, tensor: Tensor, positions: slice) -> Tensor:
        """What the kernel gets of a tensor of shape `(batch, heads, positions, dim)`."""
        if not self.is_all_of(tensor, positions):
            tensor = tensor[self.batch, :, positions]
        return fold(tensor, self.chunk) if self.is_folded else tensor

    def untake(self, tensor: Tensor, whole: Tensor) -> Tensor:
        """What the kernel gave, in the order of the positions of `whole`."""
        return unfold(tensor, whole[self.batch].shape[0]) if self.is_folded else tensor

    def is_all_of(self, tensor: Tensor, positions: slice) -> bool:
        return positions.stop - positions.start == tensor.shape[2] and self.batch == slice(None)

    def index(self, positions: slice) -> tuple[slice, slice, slice]:
        return self.batch, slice(None), positions


def fold(tensor: Tensor, chunk: int) -> Tensor:
    """`(batch, heads, n * chunk, ...)` as `(batch * n, heads, chunk, ...)`."""
    batch, heads, length, *dim = tensor.shape
    return tensor.transpose(1, 2).reshape(batch * (length // chunk), chunk, heads, *dim).transpose(1, 2)


def unfold(tensor: Tensor, batch: int) -> Tensor:
    """The inverse of `fold`."""
    _, heads, chunk, *dim = tensor.shape
    return tensor.transpose(1, 2).reshape(batch, tensor.shape[0] // batch * chunk, heads, *dim).transpose(1, 2)


def causal_parts(num_rows: int, num_columns: int, window: int | None, like: Tensor) -> Iterator[Part]:
    """The parts of `num_rows` queries, the last at the last of `num_columns` keys, each seeing `window` keys."""
    past = num_columns - num_rows
    rows = slice(0, num_rows)
    if num_rows == 1:
        yield Part(rows, slice(0 if window is None else max(0, num_columns - window), num_columns))
    elif window is None or window >= num_columns:
        if past > 0:
            yield Part(rows, slice(0, past))
        yield Part(rows, slice(past, num_columns), causal=True)
    else:
        yield from window_parts(num_rows, past, window, like)


def window_parts(num_rows: int, past: int, window: int, like: Tensor) -> Iterator[Part]:
    """As `causal_parts`, `past` keys being before the first query. Work and memory grow with `num_rows * window`."""
    end = past + num_rows
    if window == 1:
        yield Part(slice(0, num_rows), slice(past, end), chunk=1)
        return
    chunk = max(MIN_CHUNK, window)
    reach = window - 1
    if num_rows <= chunk:
        columns = slice(max(0, past - reach), end)
        yield Part(slice(0, num_rows), columns, mask=band(num_rows, columns.stop - columns.start, window, like))
        return
    if past > 0:
        rows, columns = slice(0, min(reach, num_rows)), slice(max(0, past - reach), past)
        num_columns = columns.stop - columns.start
        yield Part(rows, columns, mask=band(rows.stop, num_columns, window, like, row_offset=num_columns))
    whole = num_rows // chunk * chunk
    own = None if window == chunk else band(chunk, chunk, window, like)
    yield Part(slice(0, whole), slice(past, past + whole), causal=own is None, mask=own, chunk=chunk)
    if whole > chunk:
        previous = band(chunk, chunk, window, like, row_offset=chunk)
        yield Part(slice(chunk, whole), slice(past, past + whole - chunk), mask=previous, chunk=chunk)
    if whole < num_rows:
        tail = num_rows - whole
        columns = slice(end - tail - reach, end)
        yield Part(slice(whole, num_rows), columns, mask=band(tail, tail + reach, window, like))


def source_parts(query: Tensor, keys: Tensor, mask: JointMask, window: int | None, given: Tensor | None) -> list[Part]:
    """The parts of one source."""
    num_rows, num_columns = query.shape[2], keys.shape[2]
    if given is not None:
        return [Part(slice(0, num_rows), slice(0, num_columns), mask=additive(given, query.dtype))]
    if mask.documents is not None:
        return document_parts(mask.documents, window, query)
    parts = list(causal_parts(num_rows, num_columns, window, query))
    if mask.padding is None or window == 1:
        return parts
    hidden = additive(mask.padding[:, None, None, -num_columns:], query.dtype)
    return [hide(part, hidden) for part in parts]


def hide(part: Part, hidden: Tensor) -> Part:
    """A part with the keys hidden that are padding: `hidden` is additive and of shape `(batch, 1, 1, keys)`."""
    hidden = hidden[..., part.columns]
    if part.is_folded:
        hidden = fold(hidden.transpose(2, 3), part.chunk).transpose(2, 3)
    return part._replace(mask=hidden if part.mask is None else torch.minimum(part.mask, hidden))


def document_parts(documents: Tensor, window: int | None, like: Tensor) -> list[Part]:
    """The parts of packed documents, numbered at each position by `documents` of shape `(batch, length)`."""
    length = documents.shape[1]
    rows = [[0, *((row.diff() != 0).nonzero()[:, 0] + 1).tolist(), length] for row in documents]
    alike = all(row == rows[0] for row in rows)
    parts = []
    for n, starts in enumerate(rows[:1] if alike else rows):
        batch = slice(None) if alike else slice(n, n + 1)
        for start, end in zip(starts, starts[1:], strict=False):
            for part in causal_parts(end - start, end - start, window, like):
                shifted = (slice(s.start + start, s.stop + start) for s in (part.rows, part.columns))
                parts.append(Part(*shifted, part.causal, part.mask, part.chunk, batch))
    return parts


class CpuFlash:
    """PyTorch's flash attention for CPU. Groups of query heads share keys; a mask may be broadcast."""

    TAKES_GROUPS = True

    # The backward takes 512 queries at a time, with all the keys that the last of them sees. Cutting the keys into
    # blocks leaves less of the future to compute; in half precision a call costs more than that saves.
    CAUSAL_BLOCK = 256
    MIN_CAUSAL_LENGTH = 384

    @staticmethod
    def forward(query, keys, values, causal, mask, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
        )

    @classmethod
    def backward(cls, grad, query, keys, values, out, lse, causal, mask, scale):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        num_keys = keys.shape[2]
        if not causal or num_keys < cls.MIN_CAUSAL_LENGTH or query.dtype.itemsize == 2:
            return kernel(grad, query, keys, values, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        dq, dk, dv = None, [], []
        for start in range(0, num_keys, cls.CAUSAL_BLOCK):
            rows, columns = slice(start, None), slice(start, start + cls.CAUSAL_BLOCK)
            block_grad, block_query, block_out, block_lse = (t[:, :, rows] for t in (grad, query, out, lse))
            block_mask = None if mask is None else mask[..., columns]
            arguments = (block_grad, block_query, keys[:, :, columns], values[:, :, columns], block_out, block_lse)
            block_dq, *others = kernel(*arguments, 0.0, causal, attn_mask=block_mask, scale=scale)
            dq = block_dq if dq is None else dq
            if start > 0:
                dq[:, :, rows] += block_dq
            for blocks, block in zip((dk, dv), others, strict=True):
                blocks.append(block.transpose(1, 2))
        return dq, *(torch.cat(blocks, 1).transpose(1, 2) for blocks in (dk, dv))


class CudaFlash:
    """PyTorch's flash attention for CUDA: 16-bit numbers, no mask. Groups of query heads share keys."""

    TAKES_GROUPS = True

    @staticmethod
    def forward(query, keys, values, causal, mask, scale):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, keys, values, 0.0, causal, scale=scale)[:2]

    @staticmethod
    def backward(grad, query, keys, values, out, lse, causal, mask, scale):
        lengths = (None, None, query.shape[2], keys.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, keys, values, out, lse, *lengths, 0.0, causal, *no_dropout(query), scale=scale
        )


class CudaEfficient:
    """PyTorch's memory-efficient attention for CUDA: any numbers, and masks."""

    TAKES_GROUPS = False

    ROW_ALIGNMENT = 32  # of the log-sum-exp
    MASK_ALIGNMENT = 16

    @classmethod
    def forward(cls, query, keys, values, causal, mask, scale):
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        bias = cls._bias(mask, query, keys)
        out, lse, _, _ = efficient(query, keys, values, bias, True, 0.0, causal, scale=scale)
        return out, lse[..., : query.shape[2]]

    @classmethod
    def backward(cls, grad, query, keys, values, out, lse, causal, mask, scale):
        bias = cls._bias(mask, query, keys)
        lse = torch.nn.functional.pad(lse, (0, -query.shape[2] % cls.ROW_ALIGNMENT), value=torch.inf)
        wanted = [True, True, True, False]
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, keys, values, bias, out, lse, *no_dropout(query), 0.0, wanted, causal, scale=scale
        )
        return grads[:3]

    @classmethod
    def _bias(cls, mask, query, keys):
        if mask is None:
            return None
        num_keys = keys.shape[2]
        padded = torch.nn.functional.pad(mask, (0, -num_keys % cls.MASK_ALIGNMENT))
        return padded[..., :num_keys].expand(*query.shape[:3], num_keys)


class Math:
    """The same in matrix products, for other devices and as the reference of the kernels."""

    TAKES_GROUPS = False

    @staticmethod
    def forward(query, keys, values, causal, mask, scale):
        scores = Math._scores(query, keys, causal, mask, scale)
        lse = scores.logsumexp(-1)
        return torch.exp(scores - lse[..., None]).to(values.dtype) @ values, lse

    @staticmethod
    def backward(grad, query, keys, values, out, lse, causal, mask, scale):
        weights = torch.exp(Math._scores(query, keys, causal, mask, scale) - lse[..., None]).to(grad.dtype)
        dscores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return dscores @ keys, dscores.mT @ query, weights.mT @ grad

    @staticmethod
    def _scores(query, keys, causal, mask, scale):
        scores = (query @ keys.mT * scale).to(torch.promote_types(query.dtype, torch.float32))
        if causal:
            future = band(*scores.shape[-2:], None, scores)
            mask = future if mask is None else torch.minimum(future, mask)
        return scores if mask is None else scores + mask


class OneKey:
    """A window of 1: query `i` sees key `i` alone, and no products of matrices are needed."""

    TAKES_GROUPS = False

    @staticmethod
    def forward(query, keys, values, causal, mask, scale):
        return values, OneKey._scores(query, keys, scale)

    @staticmethod
    def backward(grad, query, keys, values, out, lse, causal, mask, scale):
        weights = torch.exp(OneKey._scores(query, keys, scale) - lse)[..., None].to(grad.dtype)
        dscores = weights * (grad * (values - out)).sum(-1, keepdim=True) * scale
        return dscores * keys, dscores * query, weights * grad

    @staticmethod
    def _scores(query, keys, scale):
        return (query * keys).sum(-1, dtype=torch.promote_types(query.dtype, torch.float32)) * scale


def expand_groups(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values with a head for each head of the queries."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def sum_groups(tensor: Tensor, keys: Tensor) -> Tensor:
    """The backward of `expand_groups`."""
    groups = tensor.shape[1] // keys.shape[1]
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups)).sum(2)


def no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """The random state that a CUDA kernel wants and, without dropout, does not read."""
    seed = torch.empty(2, dtype=torch.int64, device=query.device)
    return seed, seed[:0]


def kernel_for(query: Tensor, part: Part):
    """The kernel for one part."""
    if part.chunk == 1:
        return OneKey
    if query.device.type == "cpu":
        return CpuFlash
    if query.device.type != "cuda" or query.shape[-1] % 8 != 0:
        return Math
    return CudaFlash if part.mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= 256 else CudaEfficient


def attend(query: Tensor, keys: Tensor, values: Tensor, parts: list[Part], scale: float) -> tuple[Tensor, Tensor]:
    """The attention to one source: output `(batch, heads, queries, head_dim)` and log-sum-exp without the last."""
    out = lse = None
    for part in parts:
        kernel = kernel_for(query, part)
        key_values = (part.take(tensor, part.columns) for tensor in (keys, values))
        if not kernel.TAKES_GROUPS:
            key_values = (expand_groups(tensor, query) for tensor in key_values)
        part_out, part_lse = kernel.forward(part.take(query, part.rows), *key_values, part.causal, part.mask, scale)
        part_out, part_lse = part.untake(part_out, query), part.untake(part_lse, query)
        if out is None and part.is_all_of(query, part.rows):
            out, lse = part_out, part_lse
            continue
        if out is None:
            out = like_projection(query).zero_()
            lse = part_lse.new_full(query.shape[:3], torch.finfo(part_lse.dtype).min)
        index = part.index(part.rows)
        lse[index] = merge(out[index], lse[index], part_out, part_lse)
    return out, lse


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> Tensor:
    """Merge another part of the softmax into `out`, in place, and return the joint log-sum-exp."""
    joint = torch.logaddexp(lse, other_lse)
    out.lerp_(other_out, torch.exp(other_lse - joint)[..., None].to(out.dtype))
    return joint


def attend_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: list[Part],
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for query, keys and values of one source, from the joint output and log-sum-exp."""
    totals = [None, None, None]
    for part in parts:
        rows, columns = part.rows, part.columns
        kernel = kernel_for(query, part)
        part_grad, part_query, part_out, part_lse = (part.take(tensor, rows) for tensor in (grad, query, out, lse))
        key_values = (part.take(tensor, columns) for tensor in (keys, values))
        if not kernel.TAKES_GROUPS:
            key_values = (expand_groups(tensor, query) for tensor in key_values)
        dq, *grads = kernel.backward(
            part_grad, part_query, *key_values, part_out, part_lse, part.causal, part.mask, scale
        )
        grads = (dq, *(sum_groups(tensor, keys) for tensor in grads))
        whole = zip((query, keys, values), (rows, columns, columns), grads, strict=True)
        for n, (tensor, positions, part_grad) in enumerate(whole):
            part_grad = part.untake(part_grad, tensor)
            if totals[n] is None and part.is_all_of(tensor, positions):
                totals[n] = part_grad
                continue
            if totals[n] is None:
                totals[n] = like_projection(tensor).zero_()
            totals[n][part.index(positions)] += part_grad
    return tuple(totals)


def like_projection(tensor: Tensor) -> Tensor:
    """An empty tensor of the shape of `tensor`, laid out as projections are: `(batch, length, heads, dim)`."""
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)


class Source(NamedTuple):
    """Key/values, and the parts in which they are attended to."""

    keys: Tensor
    values: Tensor
    parts: list[Part]


def concatenate(query, global_keys, global_values, local_keys, local_values, mask: JointMask) -> tuple[Tensor, ...]:
    """The keys, the values and the dense mask of `[global ; local]`."""
    keys, values = torch.cat([global_keys, local_keys], dim=2), torch.cat([global_values, local_values], dim=2)
    return keys, values, dense(mask, query, global_keys, local_keys)


# Below these lengths one kernel call over concatenated keys and a dense mask takes less time on a CPU than two calls
# without (docs/performance.md).
MIN_LENGTH = {torch.float64: 48, torch.float32: 48, torch.bfloat16: 192, torch.float16: 192}


def is_short(query: Tensor, keys: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[2] > 1 and keys.shape[2] < MIN_LENGTH.get(query.dtype, 0)


def sources_of(
    query: Tensor,
    global_keys: Tensor,
    global_values: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    mask: JointMask,
    concatenated: bool | None,
) -> list[Source]:
    """The global and the local source; or both `concatenated` into one, by default where that takes less time."""
    if not (is_short(query, global_keys) if concatenated is None else concatenated):
        global_parts = source_parts(query, global_keys, mask, None, mask.global_mask)
        local_parts = source_parts(query, local_keys, mask, mask.window, mask.local_mask)
        return [Source(global_keys, global_values, global_parts), Source(local_keys, local_values, local_parts)]
    keys, values, dense_mask = concatenate(query, global_keys, global_values, local_keys, local_values, mask)
    rows, columns = slice(0, query.shape[2]), slice(0, keys.shape[2])
    return [Source(keys, values, [Part(rows, columns, mask=dense_mask)])]


# Code that travels with a checkpoint may be loaded beside the installed package: each copy has its own operators.
NAMESPACE = re.sub(r"\W", "_", __name__, flags=re.ASCII)


@torch.library.custom_op(f"{NAMESPACE}::joint_attention", mutates_args=())
def _joint_attention(
    query: Tensor,
    global_keys: Tensor,
    global_values: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    window: int | None,
    padding: Tensor | None,
    documents: Tensor | None,
    global_mask: Tensor | None,
    local_mask: Tensor | None,
    concatenated: bool | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (infinite where a query sees nothing), and log-sum-exp of the first source."""
    mask = JointMask(window, padding, documents, global_mask, local_mask)
    check_shapes(query, global_keys, global_values, local_keys, local_values, mask)
    query, *key_values = map(unit_stride, (query, global_keys, global_values, local_keys, local_values))
    first, *others = sources_of(query, *key_values, mask, concatenated)
    out, first_lse = attend(query, *first, scale)
    lse = first_lse.clone()
    for source in others:
        lse = merge(out, lse, *attend(query, *source, scale))
    if mask.may_hide_all:
        sees_nothing = is_hidden(lse, query.dtype)
        lse = lse.masked_fill(sees_nothing, torch.inf)
        out = out.masked_fill(sees_nothing[..., None], 0)
    return as_projection(out), lse.contiguous(), first_lse.contiguous()


@_joint_attention.register_fake
def _(query, *others):
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    return like_projection(query), lse, torch.empty_like(lse)


@torch.library.custom_op(f"{NAMESPACE}::joint_attention_backward", mutates_args=())
def _joint_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    global_keys: Tensor,
    global_values: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    window: int | None,
    padding: Tensor | None,
    documents: Tensor | None,
    global_mask: Tensor | None,
    local_mask: Tensor | None,
    concatenated: bool | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients for query, global keys and values, local keys and values."""
    mask = JointMask(window, padding, documents, global_mask, local_mask)
    tensors = (grad, query, global_keys, global_values, local_keys, local_values)
    grad, query, *key_values = map(unit_stride, tensors)
    dq, grads = None, []
    sources = sources_of(query, *key_values, mask, concatenated)
    for source in sources:
        source_dq, dk, dv = attend_backward(grad, query, *source, out, lse, scale)
        dq = source_dq if dq is None else dq.add_(source_dq)
        grads += [dk, dv]
    if len(sources) == 1:
        lengths = [global_keys.shape[2], local_keys.shape[2]]
        (dgk, dlk), (dgv, dlv) = (torch.split_with_sizes_copy(tensor, lengths, dim=2) for tensor in grads)
        grads = [dgk, dgv, dlk, dlv]
    return tuple(map(as_projection, (dq, *grads)))


@_joint_attention_backward.register_fake
def _(grad, out, lse, query, global_keys, global_values, local_keys, local_values, *others):
    return tuple(map(like_projection, (query, global_keys, global_values, local_keys, local_values)))


def _save(ctx, inputs, output):
    *tensors, window, padding, documents, global_mask, local_mask, concatenated, scale = inputs
    ctx.save_for_backward(*output[:2], *tensors, padding, documents, global_mask, local_mask)
    ctx.window, ctx.concatenated, ctx.scale = window, concatenated, scale


def _backward(ctx, grad, *_):
    *tensors, padding, documents, global_mask, local_mask = ctx.saved_tensors
    mask = (ctx.window, padding, documents, global_mask, local_mask)
    return *_joint_attention_backward(grad, *tensors, *mask, ctx.concatenated, ctx.scale), *[None] * 7


_joint_attention.register_autograd(_backward, setup_context=_save)


def unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def as_projection(tensor: Tensor) -> Tensor:
    """The tensor in the layout of `like_projection`; a copy only where it has another."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def check_shapes(query, global_keys, global_values, local_keys, local_values, mask: JointMask) -> None:
    """Raise a `ValueError` where shapes do not fit: the kernels would read what is not there."""
    batch, heads, num_queries, head_dim = query.shape
    require(query.numel() > 0, "query.shape", tuple(query.shape), "without a zero")
    require(mask.window is None or mask.window >= 1, "mask.window", mask.window, "a positive integer or None")
    sources = {"global": (global_keys, global_values), "local": (local_keys, local_values)}
    for name, (keys, values) in sources.items():
        shape = tuple(keys.shape)
        fits = len(shape) == 4 and (shape[0], shape[3]) == (batch, head_dim) and heads % max(shape[1], 1) == 0
        allowed = f"({batch}, a divisor of {heads}, {num_queries} or more, {head_dim})"
        require(fits and shape[1] > 0 and shape[2] >= num_queries, f"{name}_keys.shape", shape, allowed)
        require(values.shape == keys.shape, f"{name}_values.shape", tuple(values.shape), f"{shape}, as of the keys")
        given = getattr(mask, f"{name}_mask")
        if given is not None:
            sizes = zip(given.shape, (batch, heads, num_queries, shape[2]), strict=True)
            fits = all(size == whole or (size == 1 and n < 2) for n, (size, whole) in enumerate(sizes))
            allowed = f"({batch} or 1, {heads} or 1, {num_queries}, {shape[2]})"
            require(fits, f"mask.{name}_mask.shape", tuple(given.shape), allowed)
    length = global_keys.shape[2]
    for name, columns in (("padding", length), ("documents", num_queries)):
        given = getattr(mask, name)
        if given is not None and mask.global_mask is None:
            shape = tuple(given.shape)
            require(shape == (batch, columns), f"mask.{name}.shape", shape, f"{(batch, columns)}")
    if mask.documents is not None:
        require(mask.padding is None, "mask.padding", "a tensor", "None with documents")
        fits = length == local_keys.shape[2] == num_queries
        require(fits, "global_keys.shape[2]", length, f"{num_queries}, as packed documents are not cached")


def joint_attention(
    query: Tensor,
    global_keys: Tensor,
    global_values: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    mask: JointMask = NO_MASK,
    scale: float | None = None,
    return_share: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """
    Causal attention with one softmax over two sources.

    Both sources hold the last of the same positions: the last query is at the last key of each.

    Args:
        query: of shape `(batch, heads, queries, head_dim)`.
        global_keys, global_values, local_keys, local_values: of shape `(batch, key_value_heads, keys, head_dim)`, with
            as many keys as their source has; `heads` is a multiple of `key_value_heads`.
        mask: what else than the future is hidden.
        scale: of the products of queries and keys, `head_dim ** -0.5` by default.
        return_share: say how much of the attention the global source gets.

    Returns:
        The output, of the shape of `query`, zero where a query sees nothing; and, if wanted, the share of each query's
        attention that goes to the global source, of shape `(batch, heads, queries)`, without a gradient.

    Raises:
        `ValueError`: tensors or masks whose shapes do not fit together; names the one and what it must be.
    """
    tensors = (query, global_keys, global_values, local_keys, local_values)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
    concatenated = False if return_share else None
    out, lse, global_lse = _joint_attention(*tensors, *mask, concatenated, scale)
    return out, torch.exp(global_lse - lse).detach() if return_share else None
