"""Blocks of tokens that several processes stream, each its own share, and go on with at the exact token."""

import json
from pathlib import Path

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from .whole_writes import write_whole


def share_of(documents: IterableDataset, rank: int, world_size: int) -> IterableDataset:
    """
    The documents of one of several processes: each document is in the share of exactly one.

    The files of the dataset, or the row groups of its Parquet files, are dealt out. Where there are fewer than
    processes, all read everything, and each keeps every `world_size`-th document.
    """
    if world_size == 1:
        return documents
    documents = documents.reshard()
    if documents.num_shards >= world_size:
        return documents.shard(world_size, rank)
    own = {"rank": rank, "world_size": world_size}
    return documents.filter(_is_own, with_indices=True, input_columns="text", fn_kwargs=own)


def _is_own(text: str, index: int, rank: int, world_size: int) -> bool:
    return index % world_size == rank


class TokenStream(torch.utils.data.IterableDataset):
    """
    The blocks of a stream for the Trainer of this process, which know how far they were read.

    Args:
        blocks: what [`pack`] makes of the documents of this process.
        name: the corpus, for errors.

    Raises, while it is read:
        `ValueError`: it has come to its end, where more blocks were wanted.
        `RuntimeError`: it could not be read on, for example because the network failed.
    """

    def __init__(self, blocks: IterableDataset, name: str):
        self.blocks, self.name = blocks, name
        self.num_read = 0

    def __iter__(self):
        try:
            for block in self.blocks:
                self.num_read += 1
                yield block
        except Exception as error:
            raise RuntimeError(
                f"corpus={self.name!r} could not be read on after {self.num_read} blocks ({error}). "
                "The checkpoints are kept; the same command goes on from the last one"
            ) from error
        raise ValueError(
            f"corpus={self.name!r} is too short: this process has read all of its {self.num_read} blocks. "
            "The checkpoints are kept; train on fewer tokens or on a larger corpus"
        )

    def state_dict(self) -> dict:
        return {"num_read": self.num_read, "blocks": self.blocks.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.num_read = state["num_read"]
        self.blocks.load_state_dict(state["blocks"])


class StreamTrainer(Trainer):
    """
    A Trainer whose processes each train on a [`TokenStream`] of their own. A checkpoint holds how far each has read,
    and resuming goes on there, where Trainer would read again from the start all that it has trained on.

    Raises:
        `ValueError`: `dataloader_num_workers` is not 0: what workers have read ahead would be lost.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.dataloader_num_workers != 0:
            raise ValueError(
                f"dataloader_num_workers={self.args.dataloader_num_workers} is not allowed for a stream: it must be 0"
            )
        self.add_callback(_Epoch())

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by accelerate, which would share out the blocks of each process once more, and read ahead."""
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # a loader draws a number when it starts, which must not be a global one
        )

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        if resume_from_checkpoint is not None:
            path = position_file(resume_from_checkpoint, self.args.process_index)
            self.train_dataset.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        self.args.ignore_data_skip = True
        return super().train(resume_from_checkpoint, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Each process' position too, before the checkpoint counts as whole and others are deleted."""
        super()._save_rng_state(output_dir)
        path = position_file(output_dir, self.args.process_index)
        write_whole(path, json.dumps(self.train_dataset.state_dict()))
        self.accelerator.wait_for_everyone()


class _Epoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        """Trainer, told that the data are where they must be, counts the epoch from zero."""
        state.epoch = state.global_step / state.max_steps


def position_file(checkpoint: str | Path, rank: int) -> Path:
    """Where a checkpoint holds how far the process of that rank has read."""
    return Path(checkpoint) / f"stream_{rank}.json"
