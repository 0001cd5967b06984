import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetNotFoundError

from asymloop_hf.corpus import installed_docs, is_prose, load_corpus


def prose(subject, sentences=12):
    return " ".join(f"The {subject} is described here in sentence number {n} of many." for n in range(sentences))


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def site_packages(tmp_path):
    module = f'''
"""{prose("module")}"""

class Gear:
    r"""{prose("class")}

        Indented, with a \\d that is no escape."""

    async def turn(self):
        """{prose("method")}"""
        wheel = """{prose("plain string")}"""
        def inner():
            """{prose("inner function")}"""

def short():
    """Too short to keep."""

def again():
    """{prose("method")}"""
'''
    return write(
        tmp_path / "site-packages",
        {
            "gears/core.py": module,
            "gears/README.md": prose("readme"),
            "gears/docs/guide.rst": prose("guide").replace(". ", ".\r\n"),
            "gears/notes.txt": prose("notes"),
            "gears-1.0.dist-info/METADATA": "Name: gears\nSummary: "
            + prose("summary")
            + "\n\n"
            + prose("description"),
            "gears-1.0.dist-info/LICENSE.txt": prose("licence"),
            "gears-1.0.dist-info/licenses/EXTRA.md": prose("extra licence"),
            "gears-1.0.dist-info/top_level.txt": "gears\n" * 100,
            "gears/requirements-dev.txt": prose("requirement"),
            "gears/tests/test_core.py": f'"""{prose("test")}"""',
            "gears/__pycache__/core.txt": prose("cache"),
            "gears/words.txt": "\n".join(f"word{chr(97 + n % 26)}" for n in range(500)),
            "gears/numbers.txt": " ".join(str(n) for n in range(500)),
            "gears/russian.md": "Это предложение написано по-русски. " * 20,
            "gears/latin1.txt": prose("café").encode("latin-1"),
            "gears/broken.py": f'"""{prose("broken")}"""\ndef (',
            "gears/nul.py": f'"""{prose("nul")}"""\n\0',
            "gears/data.json": json.dumps(prose("data")),
            "asymloop_hf-0.1.0.dist-info/METADATA": "Name: asymloop-hf\n\n" + prose("this project"),
            "__editable___asymloop_hf_finder.py": f'"""{prose("finder")}"""',
        },
    )


def subjects(documents):
    return [text.removeprefix("The ").partition(" is")[0] for text in documents["text"]]


def test_installed_docs_are_docstrings_descriptions_and_documentation_files(site_packages):
    documents = installed_docs([site_packages])
    assert documents.column_names == ["text", "source"]
    assert list(zip(subjects(documents), documents["source"], strict=True)) == [
        ("description", "gears-1.0.dist-info/METADATA"),
        ("readme", "gears/README.md"),
        ("module", "gears/core.py"),
        ("class", "gears/core.py"),
        ("method", "gears/core.py"),
        ("inner function", "gears/core.py"),
        ("guide", "gears/docs/guide.rst"),
        ("notes", "gears/notes.txt"),
    ]


def test_installed_docs_are_clean_text(site_packages):
    text = dict(zip(subjects(documents := installed_docs([site_packages])), documents["text"], strict=True))
    assert text["class"] == prose("class") + "\n\nIndented, with a \\d that is no escape."
    assert "\r" not in text["guide"]


def test_installed_docs_keep_equal_texts_once_across_folders(site_packages, tmp_path):
    other = write(tmp_path / "other", {"copy.md": "\n" + prose("readme") + "\n", "new.md": prose("new")})
    texts = Counter(installed_docs([site_packages, other])["text"])
    assert set(texts.values()) == {1}
    assert texts[prose("new")] == 1


def test_installed_docs_depend_on_the_installed_files_alone(site_packages, tmp_path):
    files = [path for path in site_packages.rglob("*") if path.is_file()]
    for path in sorted(files, reverse=True):
        write(tmp_path / "copy", {path.relative_to(site_packages).as_posix(): path.read_bytes()})
    write(tmp_path / "copy", {"gears/core.pyc": b"\0", "gears/sub/__pycache__/x.py": f'"""{prose("compiled")}"""'})
    code = (
        "import sys, json; from asymloop_hf.corpus import installed_docs;"
        "print(json.dumps(installed_docs([sys.argv[1]])[:]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for folder, seed in [(site_packages, "1"), (tmp_path / "copy", "2")]
    ]
    assert json.loads(runs[0]) == json.loads(runs[1]) == installed_docs([site_packages])[:]


def test_installed_docs_read_the_standard_library(tmp_path):
    documents = installed_docs([Path(sysconfig.get_path("stdlib"), "email")])
    assert "Parser" in " ".join(documents["text"])
    assert len(documents) > 20


def test_installed_docs_need_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="paths has '.*nowhere', which is not a folder"):
        installed_docs([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    "text, expected",
    [
        (prose("text"), True),
        ("\n".join(["word"] * 200), False),
        ("3.14 " * 200, False),
        ("Το κείμενο είναι ελληνικό. " * 20, False),
    ],
)
def test_is_prose(text, expected):
    assert is_prose(text) is expected


def jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": n, column: text}) + "\n" for n, text in enumerate(texts)))
    return str(path)


TEXTS = [prose(f"topic {n}", 2) for n in range(400)]


@pytest.mark.parametrize("held_out", [0.25, 50])
def test_every_text_is_in_exactly_one_split(tmp_path, held_out):
    corpus = load_corpus(jsonl(tmp_path / "a.jsonl", TEXTS + TEXTS[:100] + ["", " \n"]), held_out=held_out)
    assert list(corpus) == ["train", "held_out"]
    assert corpus["train"].column_names == corpus["held_out"].column_names == ["text"]
    assert Counter([*corpus["train"]["text"], *corpus["held_out"]["text"]]) == Counter(TEXTS)
    if held_out == 50:
        assert len(corpus["held_out"]) == 50
    else:
        assert 0.15 < len(corpus["held_out"]) / len(TEXTS) < 0.35


def test_a_text_keeps_its_split_when_the_corpus_is_reordered_or_grows(tmp_path):
    small = load_corpus(jsonl(tmp_path / "small.jsonl", TEXTS[:300]), held_out=0.1)
    large = load_corpus(jsonl(tmp_path / "large.jsonl", TEXTS[::-1]), held_out=0.1)
    assert set(small["held_out"]["text"]) == set(large["held_out"]["text"]) & set(TEXTS[:300])


def test_the_seed_chooses_what_is_held_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    first, same, other = (set(load_corpus(path, held_out=0.2, seed=seed)["held_out"]["text"]) for seed in (0, 0, 1))
    assert first == same != other


def test_a_stream_holds_out_its_first_documents_and_trains_on_the_others(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["", *TEXTS, *TEXTS[:50]], column="content")
    corpus = load_corpus(path, streaming=True, held_out=20, text_column="content")
    assert isinstance(corpus["train"], IterableDataset)
    assert isinstance(corpus["held_out"], Dataset)
    assert corpus["held_out"]["text"] == TEXTS[:20]
    for _ in range(2):
        assert [row["text"] for row in corpus["train"]] == TEXTS[20:] + TEXTS[20:50]


def test_a_hub_name_is_streamed_with_its_config(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return Dataset.from_dict({"text": TEXTS, "url": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_corpus("HuggingFaceFW/fineweb-edu:sample-10BT", held_out=5)
    load_corpus("owner/name", held_out=5)
    assert asked == [
        (("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train", "streaming": True}),
        (("owner/name", None), {"split": "train", "streaming": True}),
    ]
    assert next(iter(corpus["train"])) == {"text": TEXTS[5]}


@pytest.mark.parametrize("error", [DatasetNotFoundError("no such dataset"), ConnectionError("offline")])
def test_a_name_that_the_hub_does_not_give(monkeypatch, error):
    def load_dataset(*args, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        FileNotFoundError, match=f"corpus='no/such' is not an existing local path, and the hub .*{error}"
    ):
        load_corpus("no/such")


def test_installed_docs_by_name(monkeypatch, site_packages):
    monkeypatch.setattr("asymloop_hf.corpus._installation", lambda: [site_packages])
    corpus = load_corpus("installed-docs", held_out=2)
    assert len(corpus["held_out"]) == 2
    assert Counter([*corpus["train"]["text"], *corpus["held_out"]["text"]]) == Counter(installed_docs()["text"])
    assert isinstance(load_corpus("installed-docs", held_out=2, streaming=True)["train"], IterableDataset)


def test_text_files_of_a_folder_are_documents(tmp_path):
    texts = {"a.txt": "First.\n\nStill first.\n", "sub/b.md": "# Second\n", "[c].TXT": "Third: é", ".hidden": "no"}
    corpus = load_corpus(str(write(tmp_path / "my corpus", texts)), held_out=1)
    assert {*corpus["train"]["text"], *corpus["held_out"]["text"]} == set(texts.values()) - {"no"}


def test_paragraphs_of_a_text_file_are_documents(tmp_path):
    write(tmp_path, {"a.txt": "\r\n\r\n".join(TEXTS[:200]) + "\n\n\n\n" + "\n\n".join(TEXTS[200:]) + "\n"})
    corpus = load_corpus(str(tmp_path / "a.txt"), held_out=1)
    assert {text.strip() for split in corpus.values() for text in split["text"]} == set(TEXTS)


def test_a_small_corpus_holds_out_one_text(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(5)), encoding="utf-8")
    corpus = load_corpus(str(path))
    assert {split: len(rows) for split, rows in corpus.items()} == {"train": 4, "held_out": 1}


def test_hidden_folders_and_byte_order_marks_are_not_text(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.cfg").write_text("no text", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first", encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    corpus = load_corpus(str(tmp_path))
    assert sorted(corpus["train"]["text"][:] + corpus["held_out"]["text"][:]) == ["first", "second"]


def test_a_name_must_be_a_string():
    with pytest.raises(ValueError, match="corpus=None is not allowed; it must be a string"):
        load_corpus(None)


def test_parquet_and_json_files(tmp_path):
    Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    read = [load_corpus(str(tmp_path / name))["held_out"]["text"][:] for name in ("a.parquet", "a.json")]
    assert read[0] == read[1] != []


@pytest.mark.parametrize(
    "files, name, options, message",
    [
        ({}, "", {}, "is an empty corpus: it has no file with content"),
        ({"a.txt": " \n"}, "", {}, "the corpus is empty: every document is blank"),
        ({"a.jsonl": '{"text": "one"}\n'}, "a.jsonl", {}, "leaves no document for 'train'"),
        ({"a.jsonl": '{"text": "one"}\n'}, "a.jsonl", {"held_out": 1}, "held_out=1 leaves no document for 'train'"),
        ({"a.jsonl": ""}, "a.jsonl", {}, "is an empty corpus: it has no file with content"),
        ({"a.jsonl": '{"text": "one"}\n{"te'}, "a.jsonl", {}, "a.jsonl' cannot be read"),
        ({"a.parquet": "PAR1"}, "a.parquet", {}, "a.parquet' cannot be read"),
        ({"a.txt": b"ab\nc\xe9d"}, "", {}, r"a\.txt' is not UTF-8: byte 0xe9 at byte offset 4"),
        ({"a.csv": "text\n"}, "a.csv", {}, r"a\.csv' has an unknown extension; allowed are \.txt, \.md, \.json"),
        ({"a.txt": "a", "b.csv": "text\n"}, "", {}, r"b\.csv' has an unknown extension"),
        ({"a.txt": "a", "b.jsonl": "{}"}, "", {}, "mixes file formats"),
        ({"a.jsonl": '{"body": "a", "id": 1}'}, "", {}, "text_column='text' is not a column .* are body, id"),
        ({"a.jsonl": '{"text": 1}'}, "", {}, "text_column='text' .* holds int values; it must hold strings"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_files(tmp_path, files, name, options, message, streaming):
    write(tmp_path, files)
    options = options or ({"held_out": 1} if streaming else {})
    if streaming:
        message = message.replace("'held_out'", "'train'")
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name), streaming=streaming, **options)


@pytest.mark.parametrize("held_out", [0, -1, 0.0, 1.0, 1.5, True, "0.1", float("nan")])
def test_bad_held_out(tmp_path, held_out):
    with pytest.raises(ValueError, match=f"held_out={held_out!r} is not allowed .* an int of at least 1, or a share"):
        load_corpus(jsonl(tmp_path / "a.jsonl", TEXTS), held_out=held_out)


def test_a_stream_has_no_share_to_hold_out(tmp_path):
    with pytest.raises(ValueError, match="held_out=0.1 is not allowed .* must be a number of documents"):
        load_corpus(jsonl(tmp_path / "a.jsonl", TEXTS), streaming=True, held_out=0.1)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "a/b/c", "owner/name:", "installed_docs"])
def test_a_name_that_can_be_nothing(name):
    with pytest.raises(FileNotFoundError, match=f"corpus='{name}' is neither an existing local path nor a hub name"):
        load_corpus(name)
