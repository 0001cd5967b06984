"""Muon for some parameter groups and AdamW for the rest, in one optimizer that is saved and restored as one."""

import torch


class MuonAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` for the groups with `muon=True`, `torch.optim.AdamW` for those with `muon=False`.

    Muon's step is scaled by `0.2 sqrt(max(rows, columns))`, so that its updates are as large as AdamW's and both work
    with one learning rate and weight decay (Liu et al., 2025, "Muon is scalable for LLM training").

    Args:
        params: parameter groups, each with `muon` and its own `weight_decay`. Muon's have two-dimensional parameters.
        lr: of the groups that have none of their own.
        adamw: further arguments of AdamW.
    """

    def __init__(self, params: list[dict], lr: float, **adamw):
        muon, rest = ([group for group in params if group["muon"] is uses_muon] for uses_muon in (True, False))
        self.parts = {}
        if muon:
            self.parts[True] = torch.optim.Muon(muon, lr=lr, adjust_lr_fn="match_rms_adamw")
        if rest:
            self.parts[False] = torch.optim.AdamW(rest, lr=lr, **adamw)
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both parts; they work on the groups and the state of this optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for uses_muon, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["muon"] is uses_muon]
            part.state = self.state
            part.step()
        return loss
