"""The runs of a comparison in several processes at once, with one progress bar over the steps of all."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import datasets
import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from .comparison_run import ComparisonRun, do_run, finished

_steps_done = None  # in a worker: the queue of the parent's progress bar


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def default_processes() -> int:
    """One for each GPU; without one, one for each two cores."""
    return torch.cuda.device_count() or max(1, num_cores() // 2)


def do_runs(plan: Sequence[ComparisonRun], output: Path, processes: int, title: str) -> Iterator[list[dict]]:
    """
    Do those runs that are not done yet, and give the results of all that are done each time that one is finished, or
    once where all were.

    Args:
        output: the folder of the comparison, with its data.
        processes: that work at once, each on a GPU of its own or on its share of the cores.
        title: of the progress bar.

    Raises:
        `ChildProcessError`: a process was killed, as happens where memory runs out.
        `ValueError`: a run failed; the message says which.
    """
    found = {run: finished(run, output) for run in plan}
    done = [result for result in found.values() if result is not None]
    left = [run for run, result in found.items() if result is None]
    if not left:
        yield done
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads must not spin while others need the core
    context = multiprocessing.get_context("spawn")
    queue, numbers = context.SimpleQueue(), context.SimpleQueue()
    processes = min(processes, len(left))
    for number in range(processes):
        numbers.put(number)
    threads = max(1, num_cores() // processes)
    total = sum(run.training.steps for run in left)
    with (
        tqdm(total=total, desc=title, unit="step", smoothing=0.02) as bar,
        ProcessPoolExecutor(processes, context, _start_worker, (numbers, queue, threads)) as pool,
    ):
        reader = threading.Thread(target=_show_progress, args=(queue, bar))
        reader.start()
        try:
            futures = {pool.submit(do_run, run, output, [Progress()]): run for run in left}
            for future in as_completed(futures):
                done.append(_result(future, futures[future]))
                bar.write(f"{futures[future].folder}: held-out loss {done[-1]['training']['held_out_loss']:.4f}")
                yield list(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        finally:
            queue.put(None)
            reader.join()


def _result(future: Future, run: ComparisonRun) -> dict:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process of the comparison was killed, perhaps as memory ran out: with fewer processes each has more. "
            "Finished runs are kept; the same command goes on."
        ) from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{run.folder}: {error}") from error


def _start_worker(numbers, queue, threads: int) -> None:
    global _steps_done
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _steps_done = queue
    tqdm.set_lock(threading.RLock())  # by default a semaphore, which a worker that is ended leaves behind
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(numbers.get() % gpus)
    torch.set_num_threads(threads)
    datasets.disable_progress_bars()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers; their runs are resumed by whoever does them next."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _show_progress(queue, bar: tqdm) -> None:
    while (steps := queue.get()) is not None:
        bar.update(steps)


class Progress(TrainerCallback):
    """Tells the parent of each step."""

    def on_train_begin(self, args, state, control, **kwargs):
        _steps_done.put(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        _steps_done.put(1)
