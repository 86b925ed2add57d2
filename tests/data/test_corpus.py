"""Which text is trained on and which is held out, for every kind of source; and that local files need no network."""

import json
import re
import socket
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from mars_hf.data import load_text_corpus


@pytest.fixture(autouse=True)
def own_cache_and_no_network(tmp_path_factory, monkeypatch):
    """Caches in a folder of the test's own, and fails a test that asks the network, even if the error is swallowed."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    yield
    assert not asked, f"the network was asked for {asked}"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def texts(corpus) -> tuple[list[str], list[str]]:
    assert set(corpus) == {"train", "validation"}
    assert corpus["train"].column_names == corpus["validation"].column_names == ["text"]
    return corpus["train"]["text"][:], corpus["validation"]["text"][:]


def test_the_default_is_the_embedded_corpus_cut_at_a_paragraph():
    (train,), (validation,) = texts(load_text_corpus())
    whole = train + validation
    assert whole.startswith("PRIDE AND PREJUDICE\n") and "SENSE AND SENSIBILITY" in whole
    assert len(whole) == 1_358_456
    assert 0.099 < len(validation) / len(whole) <= 0.1
    assert train.endswith("\n\n") and not validation.startswith("\n")


def test_plain_text_holds_out_the_last_paragraphs(tmp_path):
    # 10 paragraphs of 10 characters with their blank line: the last fifth is the last two.
    text = "".join(f"para {i}..\n\n" for i in range(10))
    path = write(tmp_path / "book.txt", text)
    (train,), (validation,) = texts(load_text_corpus(dataset_path=path, validation_fraction=0.25))
    assert validation == "para 8..\n\npara 9..\n\n"
    assert train + validation == text


def test_plain_text_without_blank_lines_is_cut_at_a_line(tmp_path):
    path = write(tmp_path / "lines.txt", "title\n\n" + "".join(f"line {i}\n" for i in range(10)))
    (train,), (validation,) = texts(load_text_corpus(dataset_path=path, validation_fraction=0.3))
    # 77 characters, the last 23 start in line 6: the next line is the first to be held out.
    assert validation == "line 7\nline 8\nline 9\n", "the blank line after the title must not attract the cut"
    assert train.endswith("line 6\n")


def test_windows_line_ends_are_paragraphs_too(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"one two three\r\n\r\nfour five\r\n\r\nsix\r\n")
    assert texts(load_text_corpus(dataset_path=path, validation_fraction=0.5))[1] == ["six\n"]


def test_a_directory_of_texts_cuts_every_file_in_order_and_skips_the_readme(tmp_path):
    write(tmp_path / "README.md", "about the books\n\nnothing to learn")
    write(tmp_path / "deep" / "b.md", "b1\n\nb2\n\nb3\n")
    write(tmp_path / "a.txt", "a1\n\na2\n\na3\n")
    train, validation = texts(load_text_corpus(dataset_path=tmp_path, validation_fraction=0.5))
    assert train == ["a1\n\na2\n\n", "b1\n\nb2\n\n"]
    assert validation == ["a3\n", "b3\n"]


def test_a_glob_and_a_name_that_looks_like_one(tmp_path):
    write(tmp_path / "a[1].txt", "a1\n\na2\n")
    write(tmp_path / "b.txt", "b1\n\nb2\n")
    write(tmp_path / "c.csv", "text\nno\n")
    both = load_text_corpus(dataset_path=tmp_path / "*.txt", validation_fraction=0.7)
    assert texts(both) == (["a1\n\n", "b1\n\n"], ["a2\n", "b2\n"])
    one = load_text_corpus(dataset_path=tmp_path / "a[1].txt", validation_fraction=0.7)
    assert texts(one) == (["a1\n\n"], ["a2\n"])


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_structured_files_are_split_by_document(tmp_path, kind):
    data = Dataset.from_dict({"body": [f"document {i}" for i in range(20)], "n": list(range(20))})
    path = str(tmp_path / f"data.{kind}")
    {"csv": data.to_csv, "parquet": data.to_parquet}.get(kind, data.to_json)(path)

    def load(seed):
        return texts(load_text_corpus(dataset_path=path, text_column="body", validation_fraction=0.2, seed=seed))

    train, validation = load(seed=1)
    assert len(validation) == 4 and len(train) == 16
    assert sorted(train + validation) == sorted(data["body"])
    number = [int(text.split()[1]) for text in train]
    assert number == sorted(number), "documents keep their order"
    assert load(seed=1) == (train, validation)
    assert load(seed=2)[1] != validation


def test_splits_of_a_directory_are_used_and_the_test_split_is_left_alone(tmp_path):
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"text": f"{split} {i}"} for i in range(3)])
    for source in ("dataset_path", "dataset_name"):
        corpus = load_text_corpus(**{source: str(tmp_path)})
        assert texts(corpus) == (["train 0", "train 1", "train 2"], ["validation 0", "validation 1", "validation 2"])
    corpus = load_text_corpus(dataset_path=tmp_path, validation_split="test")
    assert texts(corpus)[1] == ["test 0", "test 1", "test 2"]


def error(**arguments) -> str:
    with pytest.raises(ValueError) as caught:
        load_text_corpus(**arguments)
    assert "\n" not in str(caught.value), "an error is one line"
    return str(caught.value)


def test_contradicting_arguments_are_errors(tmp_path):
    assert re.search("'a'.*'b'.*choose one", error(dataset_name="a", dataset_path="b"))
    assert "needs dataset_name" in error(dataset_config="en")
    book = write(tmp_path / "a.txt", "a\n\nb\n")
    assert "validation_split='test' needs a dataset with splits" in error(dataset_path=book, validation_split="test")
    for fraction in (0, 1, -0.1, 1.5, float("nan")):
        assert f"validation_fraction={fraction} must lie between" in error(validation_fraction=fraction)


def test_sources_that_cannot_be_read_are_errors(tmp_path):
    assert "finds no file" in error(dataset_path=tmp_path / "missing.txt")
    assert "finds no file" in error(dataset_path=tmp_path)
    assert "finds no file with any content" in error(dataset_path=write(tmp_path / "empty.jsonl", ""))
    assert re.search(r"files \.docx: choose one kind of \.txt", error(dataset_path=write(tmp_path / "a.docx", "x")))
    assert "JSON parse error" in error(dataset_path=write(tmp_path / "broken.jsonl", "{nope\n"))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1") * 20)
    assert re.search("latin.txt.*utf-8", error(dataset_path=latin))
    assert re.search(r"files .*\.jsonl, \.txt: choose one kind", error(dataset_path=tmp_path))


def test_a_wrong_column_or_split_is_named_with_what_there_is(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [{"contents": "a", "n": 1}] * 4)
    assert re.search("'content'.*seen: contents, n.*mean 'contents'", error(dataset_path=path, text_column="content"))
    assert "holds int64, not text" in error(dataset_path=path, text_column="n")
    assert "validation_split='dev' is not a held-out split" in error(dataset_path=path, validation_split="dev")
    assert "validation_split='train' is not a held-out split" in error(dataset_path=path, validation_split="train")
    write_jsonl(tmp_path / "only" / "test.jsonl", [{"text": "a"}] * 4)
    assert "no split 'train' (seen: test)" in error(dataset_path=tmp_path / "only")


def test_a_side_without_text_is_an_error(tmp_path):
    assert "leaves no text for 'train'" in error(dataset_path=write(tmp_path / "blank.txt", " \n\n \n"))
    assert "leaves no text for 'validation'" in error(dataset_path=write(tmp_path / "line.txt", "only one line"))
    one = write_jsonl(tmp_path / "one.jsonl", [{"text": "a"}])
    assert "of 1 documents leaves one side empty" in error(dataset_path=one)
    none = write_jsonl(tmp_path / "none.jsonl", [{"text": ""}] * 10)
    assert "leaves no text for 'train'" in error(dataset_path=none)


def test_an_unknown_name_is_an_error(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "dataset_name='nobody/nothing' cannot be loaded" in error(dataset_name="nobody/nothing")
