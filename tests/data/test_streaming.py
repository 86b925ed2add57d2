"""A dataset read while it is trained on: the blocks of its documents, and a resume that does not read them again."""

import json

import pytest
import torch
from datasets import Dataset, load_dataset
from tiny import arguments, assert_same, losses, weights
from transformers import GPT2Config, GPT2LMHeadModel

from mars_hf import MARSTrainer
from mars_hf.data import StreamedBlocks, causal_collator, pack, streaming, train_tokenizer
from mars_hf.data.streaming import StreamState, load_stream

LENGTH, BATCH, STEPS = 16, 4, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    for part in range(2):
        rows = [{"body": f"{part} {i} " + "the cat sat on the mat " * (i % 3)} for i in range(20)]
        (folder / f"train-{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat " * 50], 262)


def open_stream(folder, tokenizer, checkpoint=None, blocks_per_step=BATCH):
    documents, held_out = load_stream(str(folder), None, "body", 4)
    return StreamedBlocks(documents, tokenizer, LENGTH, blocks_per_step, checkpoint), held_out


@pytest.fixture
def small_batches(monkeypatch):
    """Documents by sevens, so that a run goes over many batches and, 36 documents long, more than once over all."""
    monkeypatch.setattr(streaming, "DOCUMENTS_PER_BATCH", 7)


def test_blocks_are_those_of_pack(folder, tokenizer, small_batches):
    rows = load_dataset(str(folder), split="train")["body"]
    stream, held_out = open_stream(folder, tokenizer)
    assert held_out["text"] == rows[:4]
    expected = []
    for start in range(4, 40, 7):
        batch = Dataset.from_dict({"text": rows[start : min(start + 7, 40)]})
        expected += [block.tolist() for block in pack(batch, tokenizer, LENGTH)["input_ids"]]
    iterator = iter(stream)
    seen = [next(iterator)["input_ids"].tolist() for _ in range(2 * len(expected))]
    assert seen == expected * 2, "all documents, and again"


def train(folder, output, tokenizer, resume=None, **settings):
    stream, _ = open_stream(folder, tokenizer, resume)
    args = arguments(output, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, **settings)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    trainer = MARSTrainer(
        model=GPT2LMHeadModel(GPT2Config(**sizes)),  # dropout 0.1
        args=args,
        train_dataset=stream,
        data_collator=causal_collator,
        callbacks=[StreamState(stream)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("state", ["with its state", "without"])
def test_resume_is_bit_for_bit(folder, tokenizer, small_batches, tmp_path, monkeypatch, state):
    straight = train(folder, tmp_path / "run", tokenizer, save_strategy="steps", save_steps=13)
    checkpoint = tmp_path / "run" / "checkpoint-13"
    saved = json.loads((checkpoint / "stream.json").read_text())
    assert (saved["step"], saved["blocks_per_step"]) == (13, BATCH)
    if state == "without":
        (checkpoint / "stream.json").unlink()
    tokenised = []
    whole = streaming.tokenise
    monkeypatch.setattr(streaming, "tokenise", lambda texts, t: tokenised.append(len(texts)) or whole(texts, t))
    resumed = train(folder, tmp_path / "on", tokenizer, resume=str(checkpoint))
    assert_same(weights(resumed), weights(straight))
    assert losses(resumed)[13:] == losses(straight)[13:]
    # Documents 0-6, 7-13, ... make blocks 0-7, 8-16, 17-22, 23-31, 32-38 and 39 of a pass. Steps 14 to 16 take 12 to 23
    # of the second pass: three times seven documents. Otherwise also all that came before, and the look at the first.
    expected = 21 if state == "with its state" else 7 + 36 + 28
    assert sum(tokenised) == expected, f"{sum(tokenised)} documents were tokenised"


def test_the_state_of_another_global_batch_is_not_used(folder, tokenizer, small_batches, tmp_path):
    (tmp_path / "stream.json").write_text(json.dumps({"step": 3, "blocks_per_step": BATCH, "state": {}}))
    first = next(iter(open_stream(folder, tokenizer)[0]))["input_ids"]
    other, _ = open_stream(folder, tokenizer, tmp_path, blocks_per_step=BATCH + 1)
    assert torch.equal(next(iter(other))["input_ids"], first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_name": "no/such/folder"}, "dataset_name='no/such/folder' cannot be loaded"),
        ({"text_column": "bodi"}, "text_column='bodi' is not in .* did you mean 'body'"),
        ({"validation_documents": 0}, "validation_documents=0 of .* is no document to evaluate on"),
        ({"validation_split": "dev"}, r"no split 'dev' \(seen: train\)"),
    ],
)
def test_refusals(folder, change, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = {"dataset_name": str(folder), "dataset_config": None, "text_column": "body", "validation_documents": 4}
    with pytest.raises(ValueError, match=message) as error:
        load_stream(**{**given, **change})
    assert "\n" not in str(error.value)


def test_less_than_a_block(folder, tokenizer):
    documents, _ = load_stream(str(folder), None, "body", 38)
    with pytest.raises(ValueError, match="no 256 documents with a block of 5000 tokens"):
        StreamedBlocks(documents, tokenizer, 5000, 1)
