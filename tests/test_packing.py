from itertools import chain

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from asymloop_hf.packing import DOCUMENTS_PER_CUT, pack
from asymloop_hf.tokenizer import train_tokenizer

TEXTS = [f"Document {n}: " + "the fox jumps over the dog. " * (n * 7 % 11) for n in range(60)] + [""]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def documents(tokenizer):
    """Each document's tokens, with the end-of-sequence token."""
    return [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]


@pytest.fixture
def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def as_dataset(texts, **columns):
    return Dataset.from_dict({"text": texts, **columns})


def flat(blocks, column):
    return list(chain.from_iterable(blocks[column]))


@pytest.mark.parametrize("block_size", [2, 7, 64])
def test_the_blocks_are_the_concatenated_documents(tokenizer, documents, block_size):
    blocks = pack(as_dataset(TEXTS, other=TEXTS), tokenizer, block_size)
    assert blocks.column_names == ["input_ids", "position_ids", "labels"]
    assert all(len(values) == block_size for row in blocks for values in row.values())
    tokens = list(chain(*documents))
    assert flat(blocks, "input_ids") == tokens[: len(tokens) // block_size * block_size]


def test_positions_restart_at_documents_and_blocks_and_no_document_predicts_the_next(tokenizer, documents):
    blocks = pack(as_dataset(TEXTS), tokenizer, 16)
    first = {sum(map(len, documents[:n])) for n in range(len(documents))}
    position = 0
    for index, (position_id, label, token) in enumerate(
        zip(*(flat(blocks, column) for column in ("position_ids", "labels", "input_ids")), strict=True)
    ):
        position = 0 if index in first or index % 16 == 0 else position + 1
        assert position_id == position
        assert label == (-100 if index in first else token)


def test_a_documents_logits_and_loss_in_a_block_are_those_of_the_document_alone(tokenizer, tiny_llama):
    texts = ["The fox.", "A dog jumps over it.", "Fox", "", "Over the dog!"] * 4
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    block_size = sum(map(len, documents)) // 4
    model = tiny_llama.double().eval()
    blocks = pack(as_dataset(texts), tokenizer, block_size).with_format("torch")[:]
    with torch.no_grad():
        packed = model(**blocks, use_cache=False)
        alone = [model(torch.tensor([tokens])).logits[0] for tokens in documents]
    # Llama normalizes and takes the softmax in float32 even when the model is in float64
    torch.testing.assert_close(packed.logits.flatten(0, 1), torch.cat(alone), rtol=0, atol=1e-6)
    losses = [
        cross_entropy(logits[:-1], torch.tensor(tokens[1:], dtype=torch.long), reduction="sum")
        for logits, tokens in zip(alone, documents, strict=True)
    ]
    torch.testing.assert_close(
        packed.loss.double(), sum(losses) / sum(len(tokens) - 1 for tokens in documents), rtol=0, atol=1e-6
    )


def test_blocks_do_not_depend_on_num_proc(tokenizer):
    texts = TEXTS * 20
    assert pack(as_dataset(texts), tokenizer, 32)[:] == pack(as_dataset(texts), tokenizer, 32, num_proc=2)[:]


def test_a_stream_gives_the_same_blocks_every_time(tokenizer):
    texts = TEXTS * 20
    stream = pack(as_dataset(texts, other=texts).to_iterable_dataset(num_shards=3), tokenizer, 32)
    assert isinstance(stream, IterableDataset)
    in_memory = list(pack(as_dataset(texts), tokenizer, 32))
    assert list(stream) == in_memory
    assert list(stream) == in_memory


def test_at_most_one_block_less_a_token_is_dropped_per_thousand_documents(tokenizer):
    texts = ["fox"] * (2 * DOCUMENTS_PER_CUT + 1)
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    blocks = pack(as_dataset(texts), tokenizer, 64)
    assert 0 <= tokens - 64 * len(blocks) <= 3 * 63


@pytest.mark.parametrize("streamed", [False, True])
def test_the_trainer_takes_the_blocks_as_they_are(tokenizer, tiny_llama, tmp_path, streamed):
    dataset = as_dataset(TEXTS).to_iterable_dataset() if streamed else as_dataset(TEXTS)
    blocks = pack(dataset, tokenizer, 32)
    arguments = TrainingArguments(
        tmp_path, max_steps=20, learning_rate=1e-2, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(tiny_llama, arguments, train_dataset=blocks, eval_dataset=blocks)
    batch = next(iter(trainer.get_train_dataloader()))
    assert {name: (values.dtype, tuple(values.shape)) for name, values in batch.items()} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (torch.int64, (8, 32))
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    assert before == pytest.approx(np.log(300), rel=0.05)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "columns, options, message",
    [
        ({"text": TEXTS}, {"block_size": 1}, "block_size=1 is too small; it must be at least 2"),
        ({"text": []}, {}, "dataset has no documents"),
        ({"body": TEXTS, "id": TEXTS}, {}, "dataset has the columns body, id; it must have a column 'text'"),
    ],
)
def test_bad_arguments(tokenizer, columns, options, message, streamed):
    dataset = Dataset.from_dict(columns)
    if streamed:
        dataset = IterableDataset.from_generator(dataset.__iter__)
    with pytest.raises(ValueError, match=message):
        pack(dataset, tokenizer, **{"block_size": 8, **options})


def test_a_tokenizer_must_have_an_eos_token(tokenizer):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="tokenizer.eos_token=None is not allowed"):
        pack(as_dataset(TEXTS), without, 8)


def test_documents_must_fill_a_block(tokenizer):
    with pytest.raises(ValueError, match="block_size=64 is too large: the 1 documents do not fill one block"):
        pack(as_dataset(["fox"]), tokenizer, 64)


def test_a_stream_takes_no_processes(tokenizer):
    with pytest.raises(ValueError, match="num_proc=2 is not allowed for an IterableDataset; it must be None"):
        pack(as_dataset(TEXTS).to_iterable_dataset(), tokenizer, 8, num_proc=2)
