"""A tiny GPT-2 with random weights, its tokenizer, and a place without network and caches."""

import json
import socket
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import mars_hf.evaluation
from mars_hf import hub

ITEMS = Path(mars_hf.evaluation.__file__).parent / "items"
VOCABULARY = 400


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    """No test depends on what the machine has cached or can reach."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets_cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub._hub_answers.cache_clear()
    yield
    hub._hub_answers.cache_clear()


@pytest.fixture
def items_dir():
    return ITEMS


@pytest.fixture
def items():
    """items(task) -> the embedded items of a task, as dictionaries."""

    def read(task):
        (path,) = (ITEMS / task).glob("*.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]

    return read


@pytest.fixture(scope="session")
def _trained_tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    bpe.train_from_iterator((ITEMS / "arc_easy" / "test.jsonl").read_text(encoding="utf-8").split("\n"), trainer)
    return bpe.to_str()


@pytest.fixture
def tokenizer(_trained_tokenizer):
    """A byte-level BPE without pad token, as GPT-2's."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained_tokenizer), eos_token="<|endoftext|>")


@pytest.fixture
def make_model():
    """make_model(n_positions) -> a GPT-2 in training mode, with dropout, whose predictions are far from uniform."""

    def make(n_positions=128):
        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": n_positions}
        config = GPT2Config(**sizes, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(config).train()

    return make


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def no_network(monkeypatch):
    """Clears the offline variables and makes every use of the network fail; returns the list of attempts."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("the network is not for this test")

    for name in hub.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts
