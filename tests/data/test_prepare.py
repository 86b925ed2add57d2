"""A corpus to files of tokens: what nanoGPT would write, killed and started again, on any number of processes."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from mars_hf.data import bin_files, encoding, load_text_corpus, read_tokens, train_tokenizer
from mars_hf.data.encoding import Encoder
from mars_hf.data.prepare import prepare

HARD = [
    "it's they'LL we've I'm 'tis ''s",
    "  two  spaces,\ttabs\n\n\nlines \n and ends  ",
    "1234 x² ½ Ⅷ 一二三 naïve €5 😀👍🏽 \u200b\u00a0\u2003 e\u0301 नमस्ते مرحبا",
    "<|endoftext|> is text, <|pad|> too",
    "def f(x):\n    return  x[0]!=1 # ...---...\r\n\r\n",
    "\x00\x1c\x1f\x85\u2028 \ufeff",
    "a" * 300 + " " * 50 + "!" * 77,
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    text = (Path(__file__).parents[2] / "mars_hf" / "data" / "embedded" / "austen.txt").read_text()
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text[:200_000], *HARD], 900).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def corpus():
    rows = [f"Document {i}. " + "It is a truth universally acknowledged. " * (i % 9) for i in range(300)] + [
        *HARD,
        "",
        None,
    ]
    return DatasetDict(train=Dataset.from_dict({"text": rows}), validation=Dataset.from_dict({"text": HARD}))


def expected(texts, tokenizer):
    ids = []
    for text in filter(None, texts):
        ids += [*tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"], 0]
    return ids


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_both_engines_give_the_ids_of_the_tokenizer(tokenizer, engine, monkeypatch):
    if engine == "tokenizers":
        monkeypatch.setattr(encoding, "find_spec", lambda name: None)
    elif find_spec("tiktoken") is None:
        pytest.skip("tiktoken is not installed")
    encoder = Encoder(tokenizer)
    assert encoder.engine == engine
    for text in HARD:
        tokens = encoder(text)
        assert tokens.dtype == np.dtype("<u2")
        assert tokens.tolist() == expected([text], tokenizer), repr(text)


def test_tiktoken_is_not_used_where_it_would_differ(tokenizer):
    pytest.importorskip("tiktoken")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["pre_tokenizer"]["add_prefix_space"] = True
    other = PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(backend)))
    other.eos_token = "<|endoftext|>"
    assert Encoder(other).engine == "tokenizers"
    assert Encoder(other)("word").tolist() == expected([" word"], tokenizer)


def test_nanogpt_files_and_their_manifest(tokenizer, corpus, tmp_path):
    manifest = prepare(corpus, tokenizer, tmp_path, source={"dataset_name": "mine"})
    assert manifest == json.loads((tmp_path / "manifest.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "tokenizer", "train.bin", "val.bin"]
    for name, split, documents in (("train.bin", "train", 307), ("val.bin", "validation", 7)):
        texts = corpus[split]["text"]
        tokens = expected(texts, tokenizer)
        assert read_tokens(tmp_path / name).tolist() == tokens, name
        size = sum(len(text.encode()) for text in filter(None, texts))
        assert manifest["splits"][split] == {"documents": documents, "tokens": len(tokens), "bytes": size}, split
        sha256 = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        assert manifest["files"][name] == {"tokens": len(tokens), "sha256": sha256}, name
    assert manifest["source"] == {"dataset_name": "mine"}
    assert manifest["tokenizer"]["vocab_size"] == len(tokenizer)
    # Done is done; another corpus does not get mixed in.
    before = (tmp_path / "train.bin").stat().st_mtime_ns
    assert prepare(corpus, tokenizer, tmp_path, source={"dataset_name": "mine"}) == manifest
    assert (tmp_path / "train.bin").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds tokens of another source, format, tokens_per_shard: choose another or"):
        prepare(corpus, tokenizer, tmp_path, source={"dataset_name": "yours"}, format="shards")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds .bin files of another origin"):
        prepare(corpus, tokenizer, tmp_path, source={})


def test_shards_and_processes(tokenizer, corpus, tmp_path):
    for num_proc in (1, 2):
        folder = tmp_path / str(num_proc)
        prepare(corpus, tokenizer, folder, source={}, format="shards", tokens_per_shard=5000, num_proc=num_proc)
        files = bin_files(folder)
        tokens = [read_tokens(file) for file in files["train"]]
        assert [file.name for file in files["validation"]] == ["fineweb_val_000000.bin"]
        assert [file.name for file in files["train"]] == [
            f"fineweb_train_{i:06d}.bin" for i in range(1, len(tokens) + 1)
        ]
        assert len(tokens) > 2 and {len(part) for part in tokens[:-1]} == {5000}
        assert np.concatenate(tokens).tolist() == expected(corpus["train"]["text"], tokenizer), f"{num_proc} processes"


def test_disk_space_is_checked_before_anything_is_written(tokenizer, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"needs about \S+ GB for the tokens .*, 1e-06 GB are free: choose"):
        prepare(corpus, tokenizer, tmp_path / "out", source={})
    assert not list((tmp_path / "out").rglob("train*"))
    monkeypatch.undo()
    needed = []
    monkeypatch.setattr("mars_hf.data.prepare.check_space", lambda folder, size, purpose: needed.append(size))
    manifest = prepare(corpus, tokenizer, tmp_path / "out", source={})
    real = 4 * sum(split["tokens"] for split in manifest["splits"].values())
    assert 0.5 * real < needed[0] < 2 * real


def test_refusals(tokenizer, corpus, tmp_path):
    with pytest.raises(ValueError, match="format='npy' is unknown: choose nanogpt or shards"):
        prepare(corpus, tokenizer, tmp_path, source={}, format="npy")
    large = train_tokenizer(["some text"], 300)
    large.add_tokens([f"<{i}>" for i in range(66_000)])
    with pytest.raises(ValueError, match=r"has 66,\d+ tokens, the files hold ids below 65,536: choose a smaller one"):
        Encoder(large)
    large = train_tokenizer(["some text"], 300)
    large.eos_token = None
    with pytest.raises(ValueError, match="has no eos_token"):
        Encoder(large)


def test_a_corpus_that_was_changed_in_between_is_not_taken_for_the_same(tokenizer, corpus, tmp_path):
    prepare(corpus, tokenizer, tmp_path / "out", source={})
    rows = corpus["train"]["text"][:]
    rows[17] = "Document 17, corrected."
    changed = DatasetDict(train=Dataset.from_dict({"text": rows}), validation=corpus["validation"])
    with pytest.raises(ValueError, match="holds tokens of another corpus: choose another or remove it"):
        prepare(changed, tokenizer, tmp_path / "out", source={})


@pytest.fixture(scope="module")
def books(tmp_path_factory, tokenizer):
    """A local corpus, and the command that prepares it."""
    folder = tmp_path_factory.mktemp("books")
    text = (Path(__file__).parents[2] / "mars_hf" / "data" / "embedded" / "austen.txt").read_text()
    rows = [text[i : i + 9000] for i in range(0, len(text), 9000)]
    (folder / "books.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def command(books, output, *options):
    given = ["--dataset_path", str(books / "books.jsonl"), "--tokenizer_name", str(books / "tokenizer")]
    return [sys.executable, "recipes/prepare_data.py", *given, "--output_dir", str(output), *options]


def test_killed_and_started_again_it_writes_the_same_bytes(root, books, tokenizer, tmp_path):
    """kill -9 of all its processes, after a few parts."""
    log = (tmp_path / "log").open("w")
    run = subprocess.Popen(
        command(books, tmp_path / "out", "--num_proc", "2"), cwd=root, stdout=log, stderr=log, start_new_session=True
    )
    parts = tmp_path / "out" / ".parts"
    deadline = time.monotonic() + 120
    while len(list(parts.glob("train-??????"))) < 5:
        assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.005)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "out" / "manifest.json").exists(), "it was not killed in the middle"
    torn = next(parts.glob("*-??????"))
    torn.write_bytes(torn.read_bytes()[:-2])  # as after a crash of the machine
    corpus = load_text_corpus(dataset_path=books / "books.jsonl")
    done = subprocess.run(command(books, tmp_path / "out"), cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name, split in (("train.bin", "train"), ("val.bin", "validation")):
        tokens = np.array(expected(corpus[split]["text"], tokenizer), "<u2").tobytes()
        assert (tmp_path / "out" / name).read_bytes() == tokens, name
        assert manifest["files"][name]["sha256"] == hashlib.sha256(tokens).hexdigest(), name
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer",
        "train.bin",
        "val.bin",
    ]


def test_without_the_hub_one_line_says_what_to_do(root, tmp_path):
    """The Hub is a port where nobody listens."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    options = ["--dataset_name", "wikitext", "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "recipes/prepare_data.py", *options],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "prepare_data.py: dataset_name='wikitext' is looked for on the Hugging Face Hub, which does not answer: give "
        "--dataset_path FILES that you have, set HF_HUB_OFFLINE=1 if it is in the cache, or HF_ENDPOINT to a mirror"
    )
