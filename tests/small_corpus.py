"""A few hundred short documents with a topic each, for tests that need text and no network."""

import json
import random

ANIMALS = [
    "otter",
    "heron",
    "badger",
    "lynx",
    "marten",
    "plover",
    "stoat",
    "falcon",
    "beaver",
    "wren",
    "hare",
    "adder",
]
PLACES = [
    "river",
    "meadow",
    "quarry",
    "harbour",
    "orchard",
    "ridge",
    "marsh",
    "valley",
    "island",
    "forest",
    "bridge",
    "tower",
]
VERBS = ["watches", "follows", "avoids", "remembers", "circles", "crosses", "guards", "leaves", "reaches", "studies"]
TIMES = ["in the morning", "after the rain", "before winter", "at night", "every summer", "once more"]


def make_documents(count=500, sentences=16, seed=0) -> list[str]:
    """Documents of sentences about one animal and two places."""
    draw = random.Random(seed)
    documents = []
    for number in range(count):
        animal, places = draw.choice(ANIMALS), draw.sample(PLACES, 2)
        lines = [
            f"The {animal} {draw.choice(VERBS)} the {draw.choice(places)} {draw.choice(TIMES)}."
            for _ in range(sentences)
        ]
        documents.append(f"Story {number}. " + " ".join(lines))
    return documents


def write_corpus(path, **kwargs) -> str:
    """Write the documents as a jsonl file, and return its path."""
    lines = [json.dumps({"text": text}) for text in make_documents(**kwargs)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
