"""Which experts each visit of a sparse layer picks on a text, and how much that differs between the loops."""

from dataclasses import dataclass

import torch

from .attention_share import text_blocks
from .modeling import AsymLoopConfig, FullLoopConfig


@dataclass
class ExpertUse:
    """
    The routing of one stack of layers.

    Args:
        use: of shape `(loops, layers, num_experts)`: the share of all picks that goes to each expert; sums to one.
        change: of shape `(loops, loops, layers)`: at `[r, s]` the share of the experts of a token in loop `s` that are
            not among its experts in loop `r`. At random it is `1 - num_experts_per_tok / num_experts`.
    """

    use: torch.Tensor
    change: torch.Tensor


def sparse_stacks(config: AsymLoopConfig | FullLoopConfig) -> dict[str, tuple[int, int]]:
    """The sparse stacks by name, in the order of their visits, each with its loops and layers."""
    if config.num_experts == 0:
        return {}
    if isinstance(config, FullLoopConfig):
        return {"stack": (config.num_loops, config.num_layers)}
    stacks = {"encoder": (1, config.num_encoder_layers), "decoder": (config.num_loops, config.num_decoder_layers)}
    return {name: sizes for name, sizes in stacks.items() if config.is_sparse(name)}


@torch.no_grad()
def expert_use(model, input_ids: torch.LongTensor) -> dict[str, ExpertUse]:
    """
    The routing of each sparse stack, `"encoder"` and `"decoder"` or, for a Full Loop, `"stack"`.

    Args:
        input_ids: tokens of one text, of shape `(length,)`; those beyond `MAX_BLOCKS` contexts are left out.

    Raises:
        `ValueError`: the model has no experts, or there are no tokens.
    """
    config = model.config
    if config.num_experts == 0:
        raise ValueError("num_experts=0 is not allowed: only a model with experts has a routing to show.")
    picks = []
    for block in text_blocks(model, input_ids):
        outputs = model(block, use_cache=False, output_router_logits=True)
        top = [logits.topk(config.num_experts_per_tok).indices for logits in outputs.router_logits]
        picks.append(torch.nn.functional.one_hot(torch.stack(top), config.num_experts).sum(2).float().cpu())
    stacks = sparse_stacks(config)
    by_stack = torch.cat(picks, 1).split([loops * layers for loops, layers in stacks.values()])
    return {
        name: use_of(visits.unflatten(0, sizes))
        for (name, sizes), visits in zip(stacks.items(), by_stack, strict=True)
    }


def use_of(picks: torch.Tensor) -> ExpertUse:
    """From picks of shape `(loops, layers, tokens, num_experts)`: one where a token goes to an expert, else zero."""
    per_token = picks[0, 0, 0].sum()
    kept = torch.einsum("rlte,slte->rsl", picks, picks) / picks.shape[2] / per_token
    return ExpertUse(use=picks.mean(2) / per_token, change=1 - kept)


def format_use(uses: dict[str, ExpertUse]) -> str:
    """As text: the experts that each visit uses most and least, and how many picks differ from the loop before."""
    rows = [("expert use", "most used", "least used", "unused", "changed")]
    for name, routing in uses.items():
        loops, layers, _ = routing.use.shape
        for layer in range(layers):
            for loop in range(loops):
                use = routing.use[loop, layer]
                rows.append(
                    (
                        f"  {name} layer {layer}" + (f", loop {loop + 1}" if loops > 1 else ""),
                        f"{use.argmax()}: {use.max():.1%}",
                        f"{use.argmin()}: {use.min():.1%}",
                        f"{int((use == 0).sum())}",
                        f"{routing.change[loop - 1, loop, layer]:.1%}" if loop > 0 else "-",
                    )
                )
    return "\n".join(f"{label:<40}" + "".join(f"{value:>12}" for value in values) for label, *values in rows)


def plot_use(uses: dict[str, ExpertUse], path) -> None:
    """Draw two maps for each sparse layer: the use of experts by loop, and the change of picks from loop to loop."""
    from matplotlib.figure import Figure

    layers = [(name, layer) for name, routing in uses.items() for layer in range(routing.use.shape[1])]
    loops, _, num_experts = max((routing.use.shape for routing in uses.values()), key=lambda shape: shape[0])
    size = (1.5 + max(2.2, 0.5 * loops) * len(layers), 3 + 0.2 * num_experts + 0.3 * loops)
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(2, len(layers), squeeze=False, height_ratios=[max(num_experts, 4), max(loops, 4)])
    highest = max(routing.use.max().item() for routing in uses.values())
    for (name, layer), above, below in zip(layers, *rows, strict=True):
        use, change = uses[name].use[:, layer], uses[name].change[:, :, layer]
        above.set_title(f"{name} layer {layer}", fontsize="medium")
        use_map = above.imshow(use.T, vmin=0, vmax=highest, cmap="viridis", aspect="auto")
        change_map = below.imshow(change, vmin=0, vmax=1, cmap="magma", aspect="auto")
        for axes in (above, below):
            axes.set_xticks(range(len(use)), [str(loop + 1) for loop in range(len(use))])
        below.set_yticks(range(len(use)), [str(loop + 1) for loop in range(len(use))])
        below.set_xlabel("loop")
        below.set_visible(len(use) > 1)
    rows[0][0].set_ylabel("expert")
    rows[1][-1].set_ylabel("compared with loop")
    figure.colorbar(use_map, ax=rows[0], label="share of picks")
    if loops > 1:
        figure.colorbar(change_map, ax=rows[1], label="picks that differ")
    figure.savefig(path, format="png", dpi=120)
