"""`asymloop eval`: zero-shot accuracy in lm-evaluation-harness, at one or several loop counts."""

import argparse
import json
from functools import cache
from pathlib import Path
from statistics import mean

from pyarrow import ArrowInvalid, parquet

from .checkpoints import checkpoint_config, load_checkpoint
from .command_options import add_device, add_loop_counts, check_new_file, positive_int
from .loop_logits import LOOPED
from .whole_writes import write_whole

TASKS_FOLDER = Path(__file__).with_name("lm_eval_tasks")
COMMONSENSE = "asymloop_commonsense"
# The tasks of that group, with the folder in `data_dir`, the split and the columns that their questions are in.
COMMONSENSE_DATA = {
    "openbookqa": ("openbookqa/main", "test", "question_stem choices answerKey"),
    "winogrande": ("winogrande/winogrande_xl", "validation", "sentence option1 option2 answer"),
    "arc_challenge": ("ai2_arc/ARC-Challenge", "test", "question choices answerKey"),
    "arc_easy": ("ai2_arc/ARC-Easy", "test", "question choices answerKey"),
    "hellaswag": ("hellaswag/default", "validation", "activity_label ctx_a ctx_b endings label"),
    "social_iqa": ("social_i_qa/default", "validation", "context question answerA answerB answerC label"),
    "piqa": ("piqa/plain_text", "validation", "goal sol1 sol2 label"),
}
ACCURACIES = ("acc", "acc_norm")


def evaluate(
    checkpoint: str,
    tasks: list[str] | None = None,
    data_dir: Path | None = None,
    limit: int | None = None,
    loop_counts: list[int] | None = None,
    batch_size: int | None = None,
    device: str | None = None,
) -> dict[int | None, dict]:
    """
    Zero-shot results of a checkpoint.

    Args:
        tasks: names of lm-eval's tasks and groups; those of `asymloop_commonsense` by default.
        data_dir: a folder `<dataset>/<config>/<split>.parquet` to read those tasks from, in place of the hub.
        limit: questions of each task; all by default.
        loop_counts: of a looped model, the trained one by default; all are answered from one reading of each text.
        batch_size: texts at once; by default as many as fit, at most 64.
        device: by default the GPU if there is one.

    Returns:
        By loop count (`None` for a model without loops) what `lm_eval.simple_evaluate` returns.

    Raises:
        `ValueError`: unknown tasks, a task whose data are not in `data_dir` or are of something else, loop counts that
            are not positive or given for a model without loops, no tokenizer, or one with more tokens than the model.
        `ConnectionError`: the hub does not answer.
    """
    from lm_eval import simple_evaluate

    manager = task_manager()
    wanted = [
        name for task in tasks or [COMMONSENSE] for name in (COMMONSENSE_DATA if task == COMMONSENSE else [task])
    ]
    unknown = [name for name in wanted if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"tasks={unknown} is not allowed: lm-eval has no such tasks or groups.")
    specs = wanted if data_dir is None else [local_tasks(wanted, data_dir)]
    lm, counts = load_lm(checkpoint, loop_counts, batch_size, device)
    results = {}
    for count in counts:
        lm.num_loops = count
        try:
            results[count] = simple_evaluate(
                model=lm, tasks=specs, task_manager=manager, num_fewshot=0, limit=limit, log_samples=False
            )
        except ConnectionError as error:
            raise ConnectionError(f"{error}. Without a network, data_dir has the commonsense tasks.") from error
    return results


@cache
def task_manager():
    """lm-eval's tasks and `asymloop_commonsense`; it takes seconds to find them."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS_FOLDER))


def local_tasks(names: list[str], data_dir: Path) -> dict:
    """A group of lm-eval's tasks, which takes their definitions, but reads from `data_dir`."""
    return {"group": "local", "task": [local_task(name, data_dir) for name in names]}


def local_task(name: str, data_dir: Path) -> dict:
    """What is different in the definition of a task that reads from `data_dir`."""
    if name not in COMMONSENSE_DATA:
        raise ValueError(f"tasks={name!r} is not allowed with data_dir: it must be one of {tuple(COMMONSENSE_DATA)}.")
    folder, split, columns = COMMONSENSE_DATA[name]
    file = data_dir / folder / f"{split}.parquet"
    if not file.is_file():
        raise ValueError(f"data_dir={str(data_dir)!r} lacks the task {name!r}: there is no file {str(file)!r}.")
    try:
        found = parquet.read_schema(file).names
    except (ArrowInvalid, OSError) as error:
        raise ValueError(
            f"data_dir: {str(file)!r} of the task {name!r} is not a whole parquet file: {error}"
        ) from error
    if lacking := [column for column in columns.split() if column not in found]:
        raise ValueError(
            f"data_dir: {str(file)!r} of the task {name!r} lacks the columns {', '.join(lacking)}; it has "
            f"{', '.join(found)}."
        )
    return {
        "task": name,
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file)}},
        **{f"{kind}_split": split if kind == split else None for kind in ("training", "validation", "test")},
    }


def load_lm(checkpoint: str, loop_counts: list[int] | None, batch_size: int | None, device: str | None) -> tuple:
    """A checkpoint as a model of lm-eval, and the loop counts that it answers at."""
    from lm_eval.models.huggingface import HFLM

    from .loop_counts_lm import LoopCountsLM

    config = checkpoint_config(checkpoint)
    is_looped = config.model_type in LOOPED
    if not is_looped and loop_counts is not None:
        raise ValueError(f"num_loops={loop_counts} is not allowed: {config.model_type!r} has no loops.")
    counts = loop_counts or [config.num_loops if is_looped else None]
    if is_looped and (min(counts) < 1 or len(set(counts)) < len(counts)):
        raise ValueError(f"num_loops={counts} is not allowed: it must be positive integers, each once.")
    model, tokenizer = load_checkpoint(checkpoint, device)
    options = {"batch_size": batch_size or "auto", "device": device}
    if not is_looped:
        return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", **options), counts
    return LoopCountsLM(model, tokenizer, counts, **options), counts


def scores(results: dict) -> dict[str, dict[str, float]]:
    """
    From lm-eval's results the accuracies of each task, or where a task has none all its metrics, with their standard
    errors; and the unweighted means of the accuracies over the tasks that have them.
    """
    tasks = {name: task_scores(results["results"][name]) for name in results["n-samples"]}
    means = {}
    for metric in ACCURACIES:
        values = [task[metric] for task in tasks.values() if metric in task]
        if values:
            means[metric] = mean(values)
    return tasks | ({"mean": means} if means else {})


def task_scores(row: dict) -> dict[str, float]:
    """The values of a row of lm-eval's results: `acc,none` is `acc` here, `acc_stderr,none` is `acc_stderr`."""
    found = {key.removesuffix(",none"): value for key, value in row.items() if "," in key}
    accuracies = [name for accuracy in ACCURACIES for name in (accuracy, f"{accuracy}_stderr")]
    return {name: found[name] for name in accuracies if name in found} or found


def format_scores(by_count: dict[int | None, dict]) -> str:
    """A table: a row for each task and metric, a column for each loop count; accuracies in percent."""
    columns = [scores(results) for results in by_count.values()]
    heads = ["" if count is None else f"{count} loop{'s' if count > 1 else ''}" for count in by_count]
    rows = [["accuracy in %", "", *heads]]
    for task, values in columns[0].items():
        for metric in values:
            if "_stderr" not in metric:
                rows.append([task, metric, *(format_score(metric, column[task]) for column in columns)])
    widths = [max(18, *(len(row[0]) + 2 for row in rows)), max(10, *(len(row[1]) for row in rows))]
    return "\n".join(
        f"{task:<{widths[0]}}{metric:<{widths[1]}}" + "".join(f"{cell:>16}" for cell in cells)
        for task, metric, *cells in rows
    )


def format_score(metric: str, values: dict[str, float]) -> str:
    value = values[metric]
    if metric not in ACCURACIES:
        return f"{value:.4g}"
    stderr = values.get(f"{metric}_stderr")
    return f"{100 * value:.1f}" + (f" ± {100 * stderr:.1f}" if isinstance(stderr, float) else "")


def run(arguments: argparse.Namespace) -> None:
    """The command `asymloop eval`."""
    output = arguments.output
    check_new_file(output)
    results = evaluate(
        arguments.checkpoint,
        arguments.tasks,
        arguments.data_dir,
        arguments.limit,
        arguments.num_loops,
        arguments.batch_size,
        arguments.device,
    )
    print(format_scores(results))
    if output is not None:
        written = {str(count): {"scores": scores(result), "lm_eval": result} for count, result in results.items()}
        write_whole(output, json.dumps(written, indent=2, default=str))


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `asymloop eval` to the console command."""
    parser = commands.add_parser("eval", help="zero-shot accuracy on the seven commonsense tasks, or on others")
    parser.add_argument("checkpoint", help="a folder or hub name")
    parser.add_argument("--tasks", type=names, help=f"of lm-eval (default: {COMMONSENSE})")
    parser.add_argument("--data-dir", type=Path, help="a folder <dataset>/<config>/<split>.parquet, for no network")
    parser.add_argument("--limit", type=positive_int, help="questions of each task (default: all)")
    add_loop_counts(parser)
    parser.add_argument("--batch-size", type=positive_int, help="texts at once (default: what fits)")
    add_device(parser)
    parser.add_argument("--output", type=Path, help="a new json file for lm-eval's results")
    parser.set_defaults(run=run)
