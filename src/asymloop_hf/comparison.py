"""`asymloop compare`: matched models trained on the same tokens with several seeds, and a report of what came out."""

import argparse
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from .comparison_data import DATA, prepare_data
from .comparison_report import report_page
from .comparison_results import summarise
from .comparison_run import ComparisonRun
from .model_variants import parse_variant
from .modeling.configuration_looped import require
from .run_pool import default_processes, do_runs
from .sizes import SIZES, Size
from .training_run import Training
from .whole_writes import write_whole

SETTINGS = "compare.json"
RESULTS = "results.json"
REPORT = "report.html"
LOCK = ".lock"
MODELS = "full_loop,asymloop,asymloop+window,full_loop+llr,asymloop+llr"
TUNE = ("baseline", "kind")
TUNING_SEED = 100  # of no run that is compared
MOST_RATES = 8  # that are tried, where the best lies at an end of those given
NUM_CHECKPOINTS = 10  # of a run, to resume from
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class Comparison:
    """
    What is compared.

    Args:
        output: the folder of its runs and its report.
        models: their names, for [`parse_variant`]; the first is the baseline.
        size: a name in `SIZES`.
        corpus: what `load_corpus` takes.
        tokens: that each model is trained on, rounded up to whole steps.
        seeds: how many; each has its own weights and order of the data, the same for all models.
        batch_size: sequences in a step.
        rates: learning rates that are tried; where the best lies at an end, one beyond it is tried too.
        tune: `"baseline"`: all models have the best rate of the first; `"kind"`: the first of each kind, with and
            without layerwise rates, finds that of its kind.
        tuning_tokens: that a model is trained on to try a rate.

    Raises:
        `ValueError`: a value out of range; the message names the field, the value and what is allowed.
    """

    output: Path
    models: tuple[str, ...]
    size: str
    corpus: str
    tokens: int
    seeds: int
    batch_size: int
    rates: tuple[float, ...]
    tune: str
    tuning_tokens: int

    def __post_init__(self):
        require(self.size in SIZES, "size", self.size, f"one of {', '.join(SIZES)}")
        require(len(set(self.models)) == len(self.models) > 0, "models", ",".join(self.models), "different names")
        for field, most in (("tokens", math.inf), ("batch_size", math.inf), ("seeds", TUNING_SEED)):
            value = getattr(self, field)
            allowed = "a whole number of at least 1" if most == math.inf else f"a whole number from 1 to {most}"
            require(type(value) is int and 1 <= value <= most, field, value, allowed)
        require(self.tune in TUNE, "tune", self.tune, f"one of {', '.join(TUNE)}")
        tuning_tokens, allowed = self.tuning_tokens, f"a whole number from 1 to tokens={self.tokens}"
        is_whole = type(tuning_tokens) is int and 1 <= tuning_tokens <= self.tokens
        require(is_whole, "tuning_tokens", tuning_tokens, allowed)
        positive = all(0 < rate < math.inf for rate in self.rates)
        require(positive and self.rates, "rates", self.rates, "one or more numbers above 0")
        for model in self.models:
            parse_variant(model).config(self.shape)

    @property
    def shape(self) -> Size:
        return replace(SIZES[self.size], batch_size=self.batch_size)

    def steps(self, tokens: int) -> int:
        return math.ceil(tokens / self.shape.step_tokens)

    def fixed(self) -> dict:
        """What must not change when models or seeds are added to a folder."""
        names = ("size", "corpus", "tokens", "batch_size", "tune", "tuning_tokens")
        return {name: getattr(self, name) for name in names} | {"rates": list(self.rates)}

    def run(self, model: str, rate: float, seed: int) -> ComparisonRun:
        return self._run(model, rate, seed, self.tokens, NUM_CHECKPOINTS)

    def tuning_run(self, model: str, rate: float) -> ComparisonRun:
        return self._run(model, rate, TUNING_SEED, self.tuning_tokens, 0)

    def _run(self, model: str, rate: float, seed: int, tokens: int, num_checkpoints: int) -> ComparisonRun:
        training = Training(
            steps=self.steps(tokens),
            batch_size=self.batch_size,
            learning_rate=rate,
            seed=seed,
            layerwise_lr=parse_variant(model).layerwise_lr,
            num_checkpoints=num_checkpoints,
        )
        return ComparisonRun(model, self.shape, training, measured=seed != TUNING_SEED)


def compare(comparison: Comparison, processes: int) -> dict:
    """
    Do the runs of a comparison that are not done yet, and write `results.json` and `report.html` after each.

    Returns:
        What `results.json` says.

    Raises:
        `ValueError`: a corpus with too few tokens, or a wrong value of a field of a model.
        `FileExistsError`: the folder holds something else, a comparison with other settings, or one that is going on.
    """
    check_folder(comparison)
    comparison.output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(comparison.output / LOCK, timeout=0):
            return _compare(comparison, processes)
    except Timeout:
        output = str(comparison.output)
        raise FileExistsError(f"output={output!r} is in use by another comparison: wait, or choose another.") from None


def _compare(comparison: Comparison, processes: int) -> dict:
    output = comparison.output
    if not (output / DATA).exists():
        write_whole(output / SETTINGS, json.dumps(comparison.fixed(), indent=2))
    num_blocks = comparison.steps(comparison.tokens) * comparison.batch_size
    prepare_data(output, comparison.corpus, comparison.shape, num_blocks)
    rates, tuning = choose_rates(comparison, processes)
    plan = [
        comparison.run(model, rates[model], seed) for seed in range(comparison.seeds) for model in comparison.models
    ]
    for done in do_runs(plan, output, processes, "Training"):
        results = comparison.fixed() | summarise(comparison.models, done) | {"tuning": tuning}
        write_whole(output / RESULTS, json.dumps(results))
        write_whole(output / REPORT, report_page(results))
    return results


def check_folder(comparison: Comparison) -> None:
    """
    Raises:
        `FileExistsError`: the folder is not a new one, nor one of this comparison, nor one that has no data yet.
    """
    output, settings = comparison.output, comparison.output / SETTINGS
    if not output.exists():
        return
    if not output.is_dir():
        raise FileExistsError(f"output={str(output)!r} is a file: choose a new or an empty folder.")
    if settings.exists():
        started = json.loads(settings.read_text(encoding="utf-8"))
        different = [name for name, value in comparison.fixed().items() if started.get(name) != value]
        if different and (output / DATA).exists():
            raise FileExistsError(
                f"output={str(output)!r} holds another comparison, which differs in {', '.join(different)}: choose "
                "another folder. Models and seeds can be added to one."
            )
    elif any(path.name != LOCK for path in output.iterdir()):
        raise FileExistsError(f"output={str(output)!r} holds something else: choose a new or an empty folder.")


def choose_rates(comparison: Comparison, processes: int) -> tuple[dict[str, float], dict[str, list]]:
    """The learning rate of each model, and for each model that tried some the pairs of rate and held-out loss."""
    leader = {model: _leader(model, comparison) for model in comparison.models}
    if len(comparison.rates) == 1:
        return dict.fromkeys(comparison.models, comparison.rates[0]), {}
    tried = {model: {} for model in dict.fromkeys(leader.values())}
    wave = [(model, rate) for model in tried for rate in comparison.rates]
    while wave:
        plan = [comparison.tuning_run(model, rate) for model, rate in wave]
        *_, results = do_runs(plan, comparison.output, processes, "Trying learning rates")
        for result in results:
            settings, loss = result["settings"], result["training"]["held_out_loss"]
            tried[settings["model"]][settings["training"]["learning_rate"]] = loss
        wave = [(model, rate) for model, losses in tried.items() if (rate := next_rate(losses)) is not None]
    rates = {model: best_rate(tried[leader[model]]) for model in comparison.models}
    return rates, {model: sorted(losses.items()) for model, losses in tried.items()}


def _leader(model: str, comparison: Comparison) -> str:
    """The model that finds the learning rate of a model."""
    if comparison.tune == "baseline":
        return comparison.models[0]
    return next(other for other in comparison.models if _kind(other) == _kind(model))


def _kind(model: str) -> tuple[str, bool]:
    variant = parse_variant(model)
    return variant.kind, variant.layerwise_lr


def best_rate(losses: dict[float, float]) -> float:
    """The rate with the smallest loss; one that is not a number counts as the largest."""
    return min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])


def next_rate(losses: dict[float, float]) -> float | None:
    """The rate to try next: beyond the end at which the best lies, twice or half of it."""
    best = best_rate(losses)
    if len(losses) >= MOST_RATES or min(losses) < best < max(losses):
        return None
    return best * 2 if best == max(losses) else best / 2


def tokens(text: str) -> int:
    """`3000000`, `3_000_000`, `3M`, `0.5B` as a number of tokens."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([KMB]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be such as 3000000, 500K, 3M or 10B")
    return round(float(match[1]) * UNITS[match[2]])


def numbers(text: str) -> tuple[float, ...]:
    """`1e-3,2e-3` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be numbers such as 1e-3,2e-3") from None


def run_command(args: argparse.Namespace) -> None:
    """The command `asymloop compare`."""
    require(args.size in SIZES, "size", args.size, f"one of {', '.join(SIZES)}")
    size = SIZES[args.size]
    rates = tuple(factor * size.learning_rate for factor in (0.5, 1, 2)) if args.rates is None else args.rates
    comparison = Comparison(
        output=args.output,
        models=tuple(args.models.split(",")),
        size=args.size,
        corpus=args.corpus,
        tokens=args.tokens,
        seeds=args.seeds,
        batch_size=size.batch_size if args.batch_size is None else args.batch_size,
        rates=rates,
        tune=args.tune,
        tuning_tokens=math.ceil(args.tokens / 4) if args.tuning_tokens is None else args.tuning_tokens,
    )
    processes = default_processes() if args.processes is None else args.processes
    require(processes >= 1, "processes", processes, "a whole number of at least 1")
    try:
        results = compare(comparison, processes)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"finished runs are kept in {args.output}; the same command goes on") from None
    print(results["table"])
    print(f"{args.output / REPORT} shows it, {args.output / RESULTS} has the numbers")


def add_command(subparsers: argparse._SubParsersAction) -> None:
    """Add `asymloop compare` to the command line."""
    parser = subparsers.add_parser("compare", help="train matched models with several seeds, and report on them")
    parser.add_argument("--output", type=Path, default=Path("compare-run"), help="folder; a started one goes on")
    parser.add_argument("--size", default="tiny", help=f"{', '.join(SIZES)} (default: tiny)")
    parser.add_argument(
        "--models",
        default=MODELS,
        help="KIND[+llr][+window[=W]][+FIELD=VALUE]..., separated by commas, the baseline first; KIND is full_loop, "
        f"asymloop or llama (default: {MODELS})",
    )
    parser.add_argument("--corpus", default="installed-docs", help="a hub dataset, a path or installed-docs (default)")
    parser.add_argument("--tokens", type=tokens, default=3_000_000, help="for each run, such as 3M (default) or 10B")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model (default: 3)")
    parser.add_argument("--batch-size", type=int, help="sequences in a step (default: the size's)")
    parser.add_argument("--rates", type=numbers, help="learning rates to try; one is taken as it is")
    parser.add_argument(
        "--tune", default="baseline", help="baseline (default): all have its best rate; kind: each kind has its own"
    )
    parser.add_argument("--tuning-tokens", type=tokens, help="to try a rate (default: a quarter of the tokens)")
    parser.add_argument("--processes", type=int, help="at once (default: one for each GPU, or for each two cores)")
    parser.set_defaults(run=run_command)
