"""A looped model in lm-evaluation-harness, at several loop counts at once."""

from collections.abc import Sequence

import torch
from lm_eval.models.huggingface import HFLM

from .loop_logits import logits_by_loops

Request = tuple[tuple[str, str], list[int], list[int]]


class LoopCountsLM(HFLM):
    """
    An `HFLM` that answers at `num_loops` loops, and reads each text once for all of `loop_counts`. What it generates,
    it generates at each count anew.

    Args:
        model, tokenizer: a looped causal language model and its tokenizer.
        loop_counts: the counts that `num_loops` will be set to.
        options: those of `HFLM`.
    """

    def __init__(self, model, tokenizer, loop_counts: Sequence[int], batch_size: int | str = "auto", **options):
        self.loop_counts = list(loop_counts)
        self.num_loops = self.loop_counts[0]
        self._answers = {}
        rows = batch_size if batch_size == "auto" else batch_size * len(self.loop_counts)
        # Copies of a request, one for each count, must not be taken for one.
        options |= {"backend": "causal", "logits_cache": False, "batch_size": rows}
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)

    def _detect_batch_size(self, requests: Sequence | None = None, pos: int = 0) -> int:
        copies = len(self.loop_counts)
        return max(1, super()._detect_batch_size(requests, pos) // copies) * copies

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest = max(len(continuation) for _, _, continuation in requests)
        if longest > self.max_length:
            raise ValueError(
                f"max_position_embeddings={self.max_length} is too short: an answer of the tasks has {longest} tokens."
            )
        key = tuple((tuple(context), tuple(continuation)) for _, context, continuation in requests)
        if key not in self._answers:
            # Sorted by their tokens, the copies of a request stay side by side, and so fill whole batches.
            copies = [request for request in requests for _ in self.loop_counts]
            rows = override_bs and override_bs * len(self.loop_counts)
            answers = super()._loglikelihood_tokens(copies, disable_tqdm, rows)
            by_count = (answers[i :: len(self.loop_counts)] for i in range(len(self.loop_counts)))
            self._answers[key] = dict(zip(self.loop_counts, by_count, strict=True))
        return self._answers[key][self.num_loops]

    def _model_call(self, inps: torch.LongTensor, attn_mask=None, labels=None) -> torch.Tensor:
        texts = inps[:: len(self.loop_counts)]
        return torch.stack(logits_by_loops(self.model, texts, self.loop_counts), dim=1).flatten(0, 1)

    def _model_generate(self, *args, **options) -> torch.Tensor:
        return super()._model_generate(*args, num_loops=self.num_loops, **options)
