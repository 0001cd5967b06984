"""The multiple-choice set from documents, and its score through lm-evaluation-harness."""

from collections import Counter

import pytest
import torch
from small_corpus import make_documents
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, set_seed
from transformers.modeling_outputs import CausalLMOutput

from asymloop_hf import AsymLoopConfig, AsymLoopForCausalLM
from asymloop_hf.continuations import make_continuations, score_continuations
from asymloop_hf.tokenizer import train_tokenizer

NUM_TOPICS, WORDS_PER_TOPIC = 40, 25


class TopicConfig(PreTrainedConfig):
    model_type = "topic"
    vocab_size: int = NUM_TOPICS * WORDS_PER_TOPIC


class TopicLM(PreTrainedModel):
    """Knows one thing: the next word is of the last word's topic."""

    config_class = TopicConfig

    def __init__(self, config):
        super().__init__(config)
        self.topic_of = torch.nn.Parameter(torch.arange(config.vocab_size) // WORDS_PER_TOPIC * 1.0)

    def forward(self, input_ids, **kwargs):
        same_topic = self.topic_of[input_ids][..., None] == self.topic_of
        return CausalLMOutput(logits=10.0 * same_topic)


def topic_documents() -> list[str]:
    """One document for each topic, of words that no other has."""
    return [" ".join(f"topic{t}word{w % WORDS_PER_TOPIC}" for w in range(100)) for t in range(NUM_TOPICS)]


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = [f"topic{t}word{w}" for t in range(NUM_TOPICS) for w in range(WORDS_PER_TOPIC)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0], pad_token=words[0])


def test_an_oracle_answers_everything():
    questions = make_continuations(topic_documents())
    scores = score_continuations(TopicLM(TopicConfig()), word_tokenizer(), questions)
    assert scores == {"questions": 40, "acc": 1.0, "acc_stderr": 0.0, "acc_norm": 1.0, "acc_norm_stderr": 0.0}


def test_an_untrained_model_is_at_chance():
    documents = make_documents(count=200)
    tokenizer = train_tokenizer(documents, 400)
    set_seed(0)
    config = AsymLoopConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    scores = score_continuations(AsymLoopForCausalLM(config), tokenizer, make_continuations(documents))
    assert scores["questions"] == 200
    assert abs(scores["acc"] - 0.25) < 3 * scores["acc_stderr"]
    assert abs(scores["acc_norm"] - 0.25) < 3 * scores["acc_norm_stderr"]


def test_questions_are_what_they_say():
    documents = make_documents(count=100)
    questions = make_continuations(documents, num_questions=80)
    assert len(questions) == 80
    assert Counter(questions["label"]) == {0: 20, 1: 20, 2: 20, 3: 20}
    for question in questions:
        passages = [question["context"] + choice for choice in question["choices"]]
        (true_passage,) = (p for p in passages if any(d.startswith(p) for d in documents))
        assert true_passage == passages[question["label"]]
        assert len(set(question["choices"])) == 4
        assert 200 <= len(question["context"]) <= 400
        assert all(60 <= len(choice) <= 120 and choice.startswith(" ") for choice in question["choices"])


def test_every_passage_is_right_once_and_wrong_three_times():
    questions = make_continuations(make_documents(count=50))
    assert set(Counter(choice for question in questions for choice in question["choices"]).values()) == {4}


def test_the_seed_decides():
    documents = make_documents(count=60)
    first, again, other = (make_continuations(documents, 20, seed=seed).to_list() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("documents", [[], make_documents(count=3), ["too short"] * 10, make_documents(count=1) * 9])
def test_too_few_documents(documents):
    with pytest.raises(ValueError, match=f"{len(documents)} documents give [013] different .* at least 4"):
        make_continuations(documents)


@pytest.mark.parametrize("name", ["num_questions", "context_chars", "continuation_chars"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_bad_sizes(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make_continuations(make_documents(count=10), **{name: value})
