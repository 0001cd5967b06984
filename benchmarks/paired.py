"""Timing that survives a busy machine: the candidates take turns, and what counts is the median of their ratios."""

import time
from collections.abc import Callable
from statistics import median


def paired(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The seconds of each candidate in each of `repeats` rounds, in which all take turns; one round more warms up."""
    seconds = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            started = time.perf_counter()
            run()
            if turn > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def speedup(seconds: dict[str, list[float]], of: str, over: str) -> float:
    """How many times faster `of` is than `over`."""
    return median(slow / fast for slow, fast in zip(seconds[over], seconds[of], strict=True))


def report(title: str, seconds: dict[str, list[float]], of: str) -> None:
    """Print how the candidate `of` compares with each other one."""
    for over in seconds:
        if over != of:
            times = ", ".join(f"{name} {1e3 * median(seconds[name]):.1f} ms" for name in (of, over))
            print(f"{title}: {speedup(seconds, of, over):.2f}x {over} ({times})", flush=True)
