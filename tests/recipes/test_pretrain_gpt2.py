"""The quick start as a user runs it, made short; resume, Ctrl-C, errors, other corpora."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = "recipes/pretrain_gpt2.py"
# The quick start itself with fewer steps, smaller blocks and fewer items.
SHORT = (
    "--max_steps 12 --block_size 48 --logging_steps 2 --eval_steps 6 --save_steps 6 --warmup_steps 2 --lm_eval_limit 4"
)
SHORT += " --lm_eval_every 6 --n_layer 2 --n_embd 64 --vocab_size 512 --per_device_train_batch_size 8"
TRAINING_ONLY = "--lm_eval_tasks none --sample_tokens 0"


@pytest.fixture(scope="module")
def run(launch, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    done = launch(RECIPE, "--output_dir", output, *SHORT.split())
    return output, done.stdout + done.stderr


def test_it_learns_and_reports(run):
    output, printed = run
    results = json.loads((output / "results.json").read_text())
    history = json.loads((output / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    evaluations = [row["eval_loss"] for row in history if "eval_loss" in row]
    assert len(evaluations) == 2
    assert evaluations[1] < evaluations[0] < 6.3  # log(512) = 6.24 is the loss of knowing nothing
    assert results["eval_loss"] == pytest.approx(evaluations[1], rel=1e-6)
    assert results["perplexity"] == pytest.approx(2.718281828459045 ** results["eval_loss"], rel=1e-9)
    assert re.search(rf"evaluation loss {results['eval_loss']:.4f} .* bits per byte", printed)
    assert "12/12" in printed  # the progress bar
    assert results["sample"].startswith("It is a truth")
    assert (output / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_the_model_card_tells_what_was_found(run):
    output, _ = run
    results = json.loads((output / "results.json").read_text())
    card = ModelCard.load(output / "final" / "README.md")
    scores = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert scores["held-out text", "loss"] == results["eval_loss"]
    assert scores["held-out text", "bits per byte"] == results["bits_per_byte"]
    for name, task in results["lm_eval"]["tasks"].items():
        assert scores[f"{name} (0-shot)", "acc_norm"] == task["acc_norm"]
    for line in (
        "the embedded corpus, two novels by Jane Austen: ",
        "vocabulary 512, blocks of 48.",
        "with mars-adamw of mars_hf",
        "| lr | 0.006 |",
        "embedded subset: first 4 of 10,042 validation items |",
        "![loss curve](loss.png)",
    ):
        assert line in card.text, f"the card lacks {line!r}"
    assert (output / "final" / "loss.png").is_file()
    assert (output / "README.md").read_text() == (output / "final" / "README.md").read_text()
    assert results["cost"]["training_seconds"] > 0
    assert results["history"][-1]["eval_loss"] == results["eval_loss"]


def test_bits_per_byte_by_hand(run, root):
    """Loss of each predicted token over the bytes it stands for, from the saved model alone."""
    output, _ = run
    results = json.loads((output / "results.json").read_text())
    from mars_hf.data import load_text_corpus

    tokenizer = AutoTokenizer.from_pretrained(output / "final")
    model = AutoModelForCausalLM.from_pretrained(output / "final").eval()
    text = load_text_corpus()["validation"]["text"][0]
    ids = [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
    blocks = torch.tensor(ids[: len(ids) // 48 * 48]).view(-1, 48)
    with torch.no_grad():
        whole = sum(float(model(b, labels=b).loss) * b.numel() / 48 * 47 for b in blocks.split(64))
    predicted = blocks[:, 1:].flatten().tolist()
    size = len(tokenizer.decode([i for i in predicted if i != tokenizer.eos_token_id]).encode("utf-8", "replace"))
    assert results["eval_loss"] == pytest.approx(whole / len(predicted), rel=1e-5)
    # The decoded text is joined without the first token of each block, all of which are single bytes or longer ASCII.
    assert results["bits_per_byte"] == pytest.approx(whole / 0.6931471805599453 / size, rel=1e-3)


def test_lm_eval_scores_are_labelled_as_those_of_a_subset(run):
    output, printed = run
    results = json.loads((output / "results.json").read_text())
    tasks = results["lm_eval"]["tasks"]
    scored = [row["step"] for row in results["history"] if "eval_hellaswag_acc_norm" in row]
    assert scored == [6, 12], "the last step is scored once"
    assert set(tasks) == {"hellaswag", "arc_easy", "arc_challenge"}
    for task in tasks.values():
        assert task["items"] == 4 and task["subset"] is True
        assert 0 <= task["acc_norm"] <= 1
    assert "embedded subset: first 4 of 10,042 validation items" in printed


def test_resume_gives_the_same_model(run, launch, tmp_path):
    output, _ = run
    launch(
        RECIPE,
        "--output_dir",
        tmp_path,
        *SHORT.split(),
        *TRAINING_ONLY.split(),
        "--resume_from_checkpoint",
        output / "checkpoint-6",
    )
    left, right = (load_file(folder / "final" / "model.safetensors") for folder in (output, tmp_path))
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_a_second_run_does_not_overwrite_the_first(run, launch):
    output, _ = run
    done = launch(RECIPE, "--output_dir", output, *SHORT.split(), check=False)
    assert done.returncode != 0
    assert "pretrain_gpt2.py: output_dir=" in done.stderr
    assert "--resume_from_checkpoint true" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lerning_rate", "1"], "unknown argument '--lerning_rate', did you mean '--learning_rate'"),
        (["--config", "recipes/configs/none.yaml"], "config='recipes/configs/none.yaml' cannot be read"),
        (["--optim", "mras"], "optim='mras' is unknown: did you mean 'mars'"),
        (["--dataset_path", "nowhere/*.txt"], "nowhere"),
        (["--model_size", "smal"], "size='smal' is unknown"),
        (["--n_head", "5"], "n_head=5"),
        (["--label_smoothing_factor", "0.1"], "label_smoothing_factor=0.1"),
    ],
)
def test_errors_are_one_line(options, message, root, tmp_path):
    command = [sys.executable, RECIPE, "--output_dir", str(tmp_path / "never"), *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert message in last, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("never/checkpoint-*"))


def heed_interrupts():
    """A process started in the background inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupt_names_the_checkpoint_and_the_way_to_resume(root, tmp_path, corpus):
    settings = SHORT.replace("--max_steps 12", "--max_steps 100000").split() + TRAINING_ONLY.split()
    command = [str(sys.executable), RECIPE, "--output_dir", str(tmp_path), "--dataset_path", str(corpus), *settings]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log, preexec_fn=heed_interrupts)
        try:
            deadline = time.monotonic() + 240
            while not list(tmp_path.glob("checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    printed = (tmp_path / "log").read_text()
    found = re.search(r"Interrupted. Last checkpoint: (\S+). To resume: add --resume_from_checkpoint true", printed)
    assert found, printed[-3000:]
    assert os.path.isdir(found[1])


@pytest.mark.parametrize("kind", ["jsonl", "dataset_name"])
def test_other_corpora(kind, root, tmp_path, corpus):
    rows = [{"body": text} for text in corpus.read_text().split("\n\n") if text.strip()]
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / "train.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    source = ["--dataset_name", str(folder)] if kind == "dataset_name" else ["--dataset_path", str(file)]
    settings = [
        *SHORT.replace("--max_steps 12", "--max_steps 2").split(),
        *TRAINING_ONLY.split(),
        "--text_column",
        "body",
    ]
    command = [sys.executable, RECIPE, "--output_dir", str(tmp_path / "run"), *source, *settings]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
