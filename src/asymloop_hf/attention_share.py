"""How much of its attention each visit of a decoder layer gives to the global KV, on a text."""

import torch

MAX_BLOCKS = 16  # of the model's context: more text hardly changes a mean


def text_blocks(model, input_ids: torch.LongTensor) -> list[torch.LongTensor]:
    """
    The first `MAX_BLOCKS` contexts of a text's tokens, each of shape `(1, length)`, on the model's device.

    Raises:
        `ValueError`: there are no tokens, or they are those of several texts.
    """
    shape = tuple(getattr(input_ids, "shape", ()))
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(
            f"input_ids of shape {shape} are not allowed: one text must have one token or more, (length,)."
        )
    blocks = input_ids.split(model.config.max_position_embeddings)[:MAX_BLOCKS]
    return [block[None].to(model.device) for block in blocks]


@torch.no_grad()
def attention_share(model, input_ids: torch.LongTensor) -> torch.Tensor:
    """
    The mean share over all tokens, of shape `(num_loops, num_decoder_layers, num_attention_heads)`.

    Args:
        input_ids: tokens of one text, of shape `(length,)`; those beyond `MAX_BLOCKS` contexts are left out.

    Raises:
        `ValueError`: the model is not an AsymLoop, or there are no tokens.
    """
    config = model.config
    if config.model_type != "asymloop":
        raise ValueError(
            f"model_type={config.model_type!r} is not allowed: only 'asymloop' has global KV to attend to."
        )
    blocks = text_blocks(model, input_ids)
    total = 0
    for block in blocks:
        outputs = model(block, use_cache=False, output_attention_share=True)
        total = total + block.shape[1] * torch.stack(outputs.attention_share)[:, 0].float().cpu()
    mean = total / sum(block.shape[1] for block in blocks)
    return mean.unflatten(0, (config.num_loops, config.num_decoder_layers))


def format_shares(shares: torch.Tensor) -> str:
    """The means over heads as text, a row for each decoder layer and a column for each loop."""
    num_loops, num_layers, _ = shares.shape
    rows = [["attention to global KV", *(f"loop {loop + 1}" for loop in range(num_loops))]]
    for layer in range(num_layers):
        rows.append([f"  decoder layer {layer}", *(f"{share:.1%}" for share in shares[:, layer].mean(-1).tolist())])
    return "\n".join(f"{label:<40}" + "".join(f"{value:>10}" for value in values) for label, *values in rows)


def plot_shares(shares: torch.Tensor, path) -> None:
    """Draw a map for each decoder layer: loops from left to right, heads from top to bottom."""
    from matplotlib.figure import Figure

    num_loops, num_layers, num_heads = shares.shape
    figure = Figure(figsize=(1.5 + 0.8 * num_loops * num_layers, 1.5 + 0.35 * num_heads), layout="constrained")
    panels = figure.subplots(1, num_layers, squeeze=False, sharey=True)[0]
    for layer, axes in enumerate(panels):
        image = axes.imshow(shares[:, layer].T, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(f"decoder layer {layer}", fontsize="medium")
        axes.set_xticks(range(num_loops), [str(loop + 1) for loop in range(num_loops)])
        axes.set_yticks(range(num_heads))
        axes.set_xlabel("loop")
        for loop in range(num_loops):
            for head in range(num_heads):
                share = shares[loop, layer, head].item()
                color = "black" if share > 0.6 else "white"
                axes.text(loop, head, f"{share:.2f}", ha="center", va="center", color=color, fontsize="x-small")
    panels[0].set_ylabel("head")
    figure.colorbar(image, ax=panels, label="share of attention to global KV")
    figure.savefig(path, format="png", dpi=120)
