"""A zero-shot multiple-choice set made from documents: which of four passages continues this one?

Each document gives a context and the passage that follows it. The wrong answers are the true continuations of three
other documents, so that every passage is the right answer once and a wrong one three times: no answer can be told from
its looks alone, and a model that ignores the context scores 25 %.
"""

import random
import re

from datasets import Dataset

NUM_CHOICES = 4
WORD_START = re.compile(r"(?<=\S) (?=\S)")  # the single spaces inside a line, where a passage may be cut


def make_continuations(texts, num_questions=200, context_chars=400, continuation_chars=120, seed=0) -> Dataset:
    """Questions with the columns `context`, `choices` (four texts) and `label` (the index of the true one).

    Passages are cut at single spaces; a continuation begins with its space. Documents that are too short, or whose
    continuation occurs twice, are left out. The right answer stands at each of the four places equally often, and the
    set depends only on the texts, in their order, and the arguments.
    """
    sizes = {
        "num_questions": (num_questions, NUM_CHOICES),
        "context_chars": (context_chars, 1),
        "continuation_chars": (continuation_chars, 1),
    }
    for name, (value, least) in sizes.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: it must be a whole number of at least {least}")
    # `sorted` after the shuffle would undo it: a dictionary keeps one context per continuation, in the shuffled order.
    texts = list(texts)
    random.Random(seed).shuffle(texts)
    contexts = {}
    for text in texts:
        if (cut := cut_passage(text, context_chars, continuation_chars)) and cut[1] not in contexts:
            contexts[cut[1]] = cut[0]
        if len(contexts) == num_questions:
            break
    if len(contexts) < NUM_CHOICES:
        raise ValueError(
            f"texts: {len(texts)} documents give {len(contexts)} different continuations after {context_chars} "
            f"characters of context; at least {NUM_CHOICES} are needed"
        )
    return Dataset.from_list([question(contexts, i) for i in range(len(contexts))])


def cut_passage(text, context_chars, continuation_chars):
    """(context, continuation) from the start of a text, both cut at spaces; None where the text is too short."""
    cuts = [space.start() for space in WORD_START.finditer(text)]
    start = max((cut for cut in cuts if cut <= context_chars), default=0)
    end = max((cut for cut in cuts if cut <= start + continuation_chars), default=0)
    if start < context_chars // 2 or end - start < continuation_chars // 2:
        return None
    return text[:start], text[start:end]


def question(contexts, index):
    """Question number `index`: its own continuation and those of the next three documents, in a ring."""
    continuations = list(contexts)
    label = index % NUM_CHOICES
    choices = [continuations[(index + 1 + k) % len(continuations)] for k in range(NUM_CHOICES - 1)]
    choices.insert(label, continuations[index])
    return {"context": contexts[continuations[index]], "choices": choices, "label": label}


def score_continuations(model, tokenizer, questions, batch_size=16) -> dict:
    """Score a causal language model on the questions through lm-evaluation-harness.

    Returns `acc`, `acc_stderr`, `acc_norm` (log-probability per character) and `acc_norm_stderr`, and the number of
    questions.
    """
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    task = ConfigurableTask(
        config={
            "task": "continuations",
            "custom_dataset": lambda **_: {"test": questions},
            "test_split": "test",
            "num_fewshot": 0,
            "output_type": "multiple_choice",
            "doc_to_text": "context",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "target_delimiter": "",  # a continuation brings its own space
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
            ],
        }
    )
    model = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    # `simple_evaluate` takes a task that is in no file only from lm-eval 0.4.12 on.
    scores = lm_eval.evaluate(model, {"continuations": task}, log_samples=False)["results"]["continuations"]
    return {"questions": len(questions)} | {
        name: float(scores[f"{name},none"]) for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    }
