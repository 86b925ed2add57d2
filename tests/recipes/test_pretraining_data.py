"""pretrain_gpt2.py on files of tokens and on a stream, in this process: what it costs is mostly the imports."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mars_hf.data import load_text_corpus, read_tokens, train_tokenizer, write_tokens
from mars_hf.data.prepare import prepare

# Every step takes 8 blocks of 48 tokens.
SHORT = (
    "--block_size 48 --logging_steps 2 --eval_strategy no --warmup_steps 2 --n_layer 1 --n_head 2 --n_embd 32 "
    "--per_device_train_batch_size 8 --cpu_threads 1 --disable_tqdm true --lm_eval_tasks none --sample_tokens 8"
)


@pytest.fixture
def pretrain(recipe, tmp_path, monkeypatch, capsys):
    """Runs the recipe; its results, and what it printed."""
    threads = torch.get_num_threads()

    def run(name, *options):
        output = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py", "--output_dir", str(output), *SHORT.split(), *options])
        recipe.main()
        return json.loads((output / "results.json").read_text()), capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, corpus):
    """The corpus as files of tokens, with the tokenizer beside them."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = load_text_corpus(dataset_path=corpus)
    train_tokenizer(texts["train"]["text"], 512).save_pretrained(folder / "mine")
    tokenizer = AutoTokenizer.from_pretrained(folder / "mine")
    prepare(texts, tokenizer, folder / "shards", source={}, format="shards", tokens_per_shard=20_000)
    return folder


def test_files_of_tokens_with_the_tokenizer_beside_them(tokens, tmp_path, pretrain):
    options = ["--dataset_path", str(tokens / "shards"), "--max_eval_blocks", "20", "--max_steps", "8"]
    results, printed = pretrain("run", *options, "--save_steps", "4")
    assert "vocabulary 512" in printed and "training tokens in 4 file(s)" in printed, printed
    assert results["eval_loss"] < 6.24, "log(512) = 6.24 is the loss of knowing nothing"
    assert results["sample"].startswith("It is a truth")
    # The text has 2.16 bytes a token.
    bytes_a_token = results["eval_loss"] / 0.6931471805599453 / results["bits_per_byte"]
    assert bytes_a_token == pytest.approx(2.16, rel=0.05)
    pretrain(
        "on", *options, "--save_strategy", "no", "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-4")
    )
    left, right = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("run", "on"))
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_files_of_tokens_without_a_tokenizer(tokens, tmp_path, pretrain):
    """By a glob, for a number of passes; a token out of the vocabulary is named, by data loader workers too."""
    written = read_tokens(tokens / "shards" / "fineweb_train_000001.bin")[:10_000].astype(np.int64)
    written[9_000] = 600
    write_tokens(tmp_path / "train.bin", written)
    write_tokens(tmp_path / "val.bin", written[:500])
    options = ["--dataset_path", str(tmp_path / "*.bin"), "--max_steps", "-1", "--num_train_epochs", "0.9"]
    with pytest.raises(ValueError, match="tokenizer_name=None: sampling and lm-eval need the tokenizer of the files"):
        pretrain("run", *options)
    options += ["--save_strategy", "no", "--sample_tokens", "0"]
    with pytest.raises(ValueError) as error:
        pretrain("run", *options, "--vocab_size", "600", "--num_train_epochs", "1.5", "--dataloader_num_workers", "1")
    last = str(error.value).strip().splitlines()[-1]
    assert last.startswith(f"ValueError: {tmp_path}/train.bin: token 600 at byte 18000 is out of the vocabulary"), last
    results, _ = pretrain("run", *options, "--vocab_size", "640")
    # 208 blocks, 8 a step: 0.9 passes are 187 blocks.
    assert results["settings"]["steps"] == 23
    assert "bits_per_byte" not in results and "sample" not in results


def test_streaming(tokens, tmp_path, pretrain, corpus):
    rows = [{"text": text} for text in corpus.read_text().split("\n\n") if text.strip()]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--streaming", "true", "--dataset_name", str(tmp_path / "data"), "--validation_documents", "50"]
    options += ["--max_steps", "8", "--save_steps", "4"]
    with pytest.raises(ValueError, match=r"streaming=True with .* tokenizer_name=None, max_steps=8: needs all three"):
        pretrain("run", *options)
    results, printed = pretrain("run", *options, "--tokenizer_name", str(tokens / "mine"), "--max_eval_blocks", "20")
    assert "a stream of tokens" in printed
    assert results["eval_loss"] < 6.24 and results["sample"].startswith("It is a truth")
    assert (tmp_path / "run" / "checkpoint-4" / "stream.json").is_file()
