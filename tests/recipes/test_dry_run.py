"""--dry_run: what it says about the paper's largest run and a small one, and that it leaves everything alone."""

import re
import sys

import pytest
import torch

from mars_hf.data import train_tokenizer, write_tokens

# Of the xl model: 48 x 12 x 1600^2 in Linear weights, (50304 + 1024) x 1600 in embeddings, 97 x 1600 norm gains.
MATRICES, EMBEDDINGS, GAINS = 1_474_560_000, 82_124_800, 155_200
TRAINED = MATRICES + EMBEDDINGS + GAINS


@pytest.fixture
def dry_run(recipe, monkeypatch, capsys):
    """Runs the recipe in this process with --dry_run; returns what it printed."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py", "--dry_run", *map(str, options)])
        recipe.main()
        return capsys.readouterr().out

    return run


def line(printed, start):
    found = [text for text in printed.splitlines() if text.startswith(start)]
    assert found, f"no line starts with {start!r}:\n{printed}"
    return found[0]


def gib(count):
    return f"{count / 2**30:.2f} GiB"


def test_the_largest_run_of_the_paper(dry_run, root, tmp_path, monkeypatch):
    config = root / "recipes" / "configs" / "gpt2_xl" / "mars_adamw.yaml"
    before = torch.get_rng_state()
    monkeypatch.chdir(tmp_path)
    printed = dry_run("--config", config, "--processes", 8)
    assert not list(tmp_path.iterdir()), "a dry run wrote something"
    assert torch.equal(torch.get_rng_state(), before), "the model was built with real random weights"
    assert f"{TRAINED:,} parameters train" in line(printed, "model:")
    groups = [text.split() for text in printed.splitlines() if re.match(r"(mars-)?adamw ", text)]
    assert groups == [
        ["mars-adamw", "0.002", "1e-05", "0.01", "0.95,", "0.99", "0.025", "0.0833", "192", f"{MATRICES:,}"],
        ["mars-adamw", "0.002", "1e-05", "0", "0.95,", "0.99", "0.025", "0.0833", "2", f"{EMBEDDINGS:,}"],
        ["adamw", "0.001", "5e-06", "0.1", "0.9,", "0.95", "-", "-", "97", f"{GAINS:,}"],
    ]
    assert "5 sequences x 12 micro-batches x 8 processes x 1,024 tokens = 491,520 tokens" in line(printed, "a step:")
    assert "100,000 steps, 49,152,000,000 tokens" in line(printed, "the run:")
    assert "warm-up of 2,000 steps to the peak, then cosine_with_min_lr {'min_lr': 1e-05}" in line(printed, "schedule:")
    assert "8 processes in bfloat16" in line(printed, "memory of a process")
    # Weights with the frozen biases (48 x 11 + 1 widths); the state: 3 tensors, 2 of the gains, 4 bytes of step count.
    frozen = (48 * 11 + 1) * 1600
    state = 12 * (MATRICES + EMBEDDINGS) + 8 * GAINS + 4 * 291
    weights, gradients = 4 * (TRAINED + frozen), 8 * TRAINED
    ddp = line(printed, "ddp ")
    assert ddp.split("  ")[-1].strip() == gib(weights + gradients + state), ddp
    assert gib(weights) in ddp and gib(gradients) in ddp, ddp
    assert f"100 of {gib(weights + state)}, at most 3 at a time" in line(printed, "checkpoints:")
    disk = line(printed, "disk:")
    assert disk.startswith(f"disk: {gib(3 * (weights + state) + weights)} with the final model in {tmp_path}"), disk
    assert "single" not in printed, "a row for one process in a plan for eight"


def test_one_process_without_a_config_is_the_quick_start(dry_run, tmp_path):
    printed = dry_run("--output_dir", tmp_path / "run", "--mars_fused", "true", "--save_total_limit", 1)
    assert "16 sequences x 1 micro-batches x 1 processes x 128 tokens = 2,048 tokens" in line(printed, "a step:")
    assert line(printed, "single ") and "ddp" not in printed, printed
    assert line(printed, "checkpoints: 3 of "), "at steps 200, 400 and 500"
    assert "at most 2 at a time" in line(printed, "checkpoints:"), "the newest is written before the oldest goes"
    assert not (tmp_path / "run").exists()


def test_disk_space_that_is_not_there_is_named(dry_run, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 10 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert line(dry_run("--output_dir", tmp_path), "disk:").endswith("10.00 MiB free: NOT ENOUGH")


def test_epochs_and_other_optimizers(dry_run, tmp_path):
    printed = dry_run("--output_dir", tmp_path, "--max_steps", -1, "--num_train_epochs", 2, "--learning_rate", "5e-3")
    assert "2 epochs of the corpus" in line(printed, "the run:")
    assert line(printed, "checkpoints:").startswith("checkpoints: ? of "), "as many as the corpus makes it"
    assert ", at most 3 at a time" in line(printed, "checkpoints:"), "save_total_limit, and the newest"
    groups = [text.split()[:3] for text in printed.splitlines() if text.startswith("mars-adamw")]
    assert groups[0] == ["mars-adamw", "0.005", "?"], "the last learning rate of a run of unknown length"
    with pytest.raises(ValueError, match="optim='adamw_torch': dry_run knows mars_hf alone"):
        dry_run("--output_dir", tmp_path, "--optim", "adamw_torch")


def test_a_model_size_takes_the_place_of_the_widths_of_the_quick_start(dry_run, tmp_path):
    kept = ["--output_dir", tmp_path, "--model_size", "small"]
    # 12 layers of 12 x 768^2 and 2 gains, the last gain, 2,048 tokens, 128 positions.
    assert f"{12 * (12 * 768**2 + 2 * 768) + 768 + (2048 + 128) * 768:,} parameters train" in line(
        dry_run(*kept), "model:"
    )
    assert f"{12 * 768**2 + 3 * 768 + (2048 + 128) * 768:,} parameters train" in line(
        dry_run(*kept, "--n_layer", 1), "model:"
    )


def test_the_vocabulary_is_that_of_the_run(dry_run, root, tmp_path, corpus):
    """Of characters as the file says, of files of tokens by the tokenizer beside them; one that is missing is named."""
    settings = root / "recipes" / "configs" / "shakespeare_char.yaml"
    printed = dry_run("--config", settings, "--dataset_path", corpus, "--output_dir", tmp_path)
    # 4 layers of 12 x 128^2 and 2 gains, the last gain, 66 tokens, 65 positions.
    assert f"{4 * (12 * 128**2 + 2 * 128) + 128 + (66 + 65) * 128:,} parameters train" in line(printed, "model:")
    train_tokenizer([corpus.read_text()[:20_000]], 300).save_pretrained(tmp_path / "tokenizer")
    for name in ("train.bin", "val.bin"):
        write_tokens(tmp_path / name, [1] * 300)
    small = ["--output_dir", tmp_path, "--dataset_path", tmp_path, "--n_layer", 1, "--n_embd", 8, "--n_head", 2]
    assert f"{12 * 8**2 + 3 * 8 + (300 + 128) * 8:,} parameters train" in line(dry_run(*small), "model:")
    with pytest.raises(ValueError, match="tokenizer_name='no/where' cannot be loaded: ") as error:
        dry_run(*small, "--tokenizer_name", "no/where")
    assert "\n" not in str(error.value)
