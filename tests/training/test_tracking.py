"""What a tracker is given, and the model card."""

import re
import subprocess
import sys
from itertools import pairwise

import pytest
from huggingface_hub import CommitInfo, HfApi, ModelCard, RepoUrl
from tiny import arguments, gpt2, rows, train
from transformers import TrainerCallback

from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.training import arguments as arguments_module
from mars_hf.training import tracking
from mars_hf.training.card import CardDetails, _losses
from mars_hf.training.tracking import git_revision


class Tracker(TrainerCallback):
    """Reads what the Trainer's own callbacks for tensorboard, wandb and trackio read."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.config, self.text, self.name = args.to_dict(), args.to_json_string(), args.run_name


def test_trackers_see_every_hyperparameter_with_its_default(tmp_path):
    tracker = Tracker()
    args = arguments(
        tmp_path / "first", optim="mars_m", optim_args="gamma=0.05,clip_c=0", mars_decay="authors", max_steps=1
    )
    train(args, callbacks=[tracker])
    assert tracker.config["mars"] == {
        "lr": 1e-2,
        "betas": [0.95, 0.99],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "gamma": 0.05,
        "is_approx": True,
        "mars_type": "mars-m",
        "optimize_1d": False,
        "lr_1d": 1e-2,
        "betas_1d": [0.9, 0.95],
        "weight_decay_1d": 0.01,
        "clip_c": None,
        "memory_efficient": False,
        "last_grad_dtype": None,
        "ns_steps": 5,
        "ns_dtype": "float32",
        "nesterov": True,
        "fused": False,
        "mars_decay": "authors",
    }
    assert tracker.config["optim"] == "mars_m" and tracker.config["mars_gamma"] == 0.025
    assert tracker.config["git_revision"] == git_revision()
    assert '"gamma": 0.05' in tracker.text
    assert tracker.name == "first"


def test_defaults_that_depend_on_the_rule_and_other_optimizers(tmp_path):
    adamw = arguments(tmp_path, mars_type="adamw", mars_beta1=0.9, run_name="mine").to_dict()
    assert adamw["run_name"] == "mine"
    assert (adamw["mars"]["lr_1d"], adamw["mars"]["betas_1d"]) == (1e-2, [0.9, 0.99])
    assert adamw["mars"]["weight_decay_1d"] is None, "the Trainer's grouping decides"
    mars = arguments(tmp_path, mars_decay="authors").to_dict()["mars"]
    assert (mars["lr_1d"], mars["betas_1d"], mars["weight_decay_1d"]) == (5e-3, [0.9, 0.95], 0.1)
    assert arguments(tmp_path, optim="adamw_torch").to_dict()["mars"] == {}


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A running script of its own folder."""
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    (tmp_path / "train.py").write_text("")
    yield tmp_path
    git_revision.cache_clear()


def revision():
    git_revision.cache_clear()
    return git_revision()


def test_the_git_revision_is_that_of_the_running_script(script, monkeypatch):
    # Folders of pytest may lie in a checkout themselves.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(script.parent))
    assert revision() is None, "no checkout"
    git(script, "init", "-q")
    assert revision() is None, "no commit yet"
    git(script, "add", "train.py")
    git(script, "commit", "-q", "-m", "first")
    commit = git(script, "rev-parse", "HEAD")
    assert len(commit) == 40 and revision() == commit
    git(script, "tag", "v1")
    (script / "train.py").write_text("changed")
    assert revision() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert revision() is None, "no git"


def test_trackers_are_a_list_and_a_missing_one_is_named(tmp_path, monkeypatch):
    installed = ["tensorboard", "wandb"]
    monkeypatch.setattr(tracking, "get_available_reporting_integrations", lambda: installed)
    assert arguments(tmp_path, report_to=["tensorboard", "wandb"]).report_to == ["tensorboard", "wandb"]
    assert arguments_module.HfArgumentParser(MARSTrainingArguments).parse_args(
        ["--report_to", "tensorboard", "wandb"]
    ).report_to == ["tensorboard", "wandb"]
    assert MARSTrainingArguments(str(tmp_path), use_cpu=True).report_to == []
    with pytest.raises(ValueError, match="report_to='trackio' is not installed: install its package or use"):
        arguments(tmp_path, report_to=["wandb", "trackio"])


def test_tensorboard_where_it_is_installed(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(arguments(tmp_path, report_to="tensorboard", max_steps=2))
    (folder,) = (tmp_path / "runs").iterdir()
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert "train/loss" in events.Tags()["scalars"]
    text = events.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"git_revision"' in text and '"clip_c"' in text


LM_EVAL = {"tasks": {"arc_easy": {"num_fewshot": 0, "acc": 0.5, "acc_stderr": 0.1, "items": 4, "data": "first 4 of 9"}}}


@pytest.fixture
def trainer(tmp_path):
    args = arguments(
        tmp_path / "card", max_steps=4, eval_strategy="steps", eval_steps=2, mars_decay="authors", mars_gamma=0.05
    )
    trainer = train(args, eval_dataset=rows())
    curve = tmp_path / "card" / "loss.png"
    trainer.card_details = CardDetails(
        "Ten novels.", {"eval_loss": 2.5, "perplexity": 12.25, "lm_eval": LM_EVAL}, curve
    )
    return trainer


def test_the_card_tells_data_optimizer_curve_and_scores(trainer, tmp_path):
    trainer.create_model_card(license="apache-2.0", tags="novels", model_name="novelist")
    card = ModelCard.load(tmp_path / "card" / "README.md")
    metadata = card.data.to_dict()
    assert metadata["license"] == "apache-2.0" and metadata["library_name"] == "transformers"
    assert {"novels", "mars"} <= set(metadata["tags"])
    assert "# novelist\n" in card.text
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert found == {
        ("held-out text", "loss"): 2.5,
        ("held-out text", "perplexity"): 12.25,
        ("arc_easy (0-shot)", "acc"): 0.5,
    }
    assert f"{trainer.model.num_parameters():,} parameters, trained for 4 steps with mars-adamw" in card.text
    losses = [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]
    assert [step for step, _ in losses] == [2, 4]
    for line in (
        "## Data\n\nTen novels.\n",
        "| gamma | 0.05 |",
        "| clip_c | 1.0 |",
        "| weight_decay_1d | 0.1 |",
        "| lr_scheduler_type | cosine_with_min_lr {'min_lr': 0.001} |",
        "| warmup_steps | 3 |",
        "| max_grad_norm | 0.5 |",
        "| sequences a step | 8 |",
        f"| git revision | {git_revision() or 'none'} |",
        "![loss curve](loss.png)",
        *(f"| {step} | {loss:.4f} |" for step, loss in losses),
        "| held-out text | perplexity | 12.2500 | the validation part |",
        "| arc_easy (0-shot) | acc | 0.5000 | 4 items, first 4 of 9 |",
    ):
        assert line in card.text, f"the card lacks {line!r}"
    assert "More information needed" not in card.text


def test_push_to_hub_uploads_the_card_that_has_the_scores(trainer, tmp_path, monkeypatch):
    uploaded = {}

    def create_repo(self, repo_id, **kwargs):
        return RepoUrl(f"https://huggingface.co/me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, **kwargs):
        uploaded.update(repo_id=repo_id, card=ModelCard.load(f"{folder_path}/README.md"))
        return CommitInfo(
            commit_url="https://huggingface.co/me/card/commit/1", commit_message="", commit_description="", oid="1"
        )

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    trainer.create_model_card()
    written = (tmp_path / "card" / "README.md").read_text()
    trainer.push_to_hub()
    assert uploaded["repo_id"] == "me/card"
    assert uploaded["card"].text in written, "push_to_hub changed the card"
    assert len(uploaded["card"].data.eval_results) == 3
    assert (tmp_path / "card" / "model.safetensors").is_file()


def test_a_card_without_details_still_names_the_optimizer(tmp_path):
    trainer = MARSTrainer(model=gpt2(), args=arguments(tmp_path, optim="mars_lion"), train_dataset=rows())
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert "trained for 0 steps with mars-lion" in text and "| lr_1d | 0.005 |" in text
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["Optimizer", "Training", "Use"]


def test_the_card_of_another_optimizer_does_not_credit_mars(tmp_path):
    trainer = MARSTrainer(model=gpt2(), args=arguments(tmp_path, optim="adamw_torch"), train_dataset=rows())
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / "README.md")
    assert "trained for 0 steps with adamw_torch in the Hugging Face Trainer." in card.text
    assert "| optim | adamw_torch |" in card.text
    assert "mars" not in (card.data.tags or []) and "MARS" not in card.text


def test_long_histories_are_thinned_and_keep_the_end():
    assert _losses([{"step": step, "eval_loss": 1.0} for step in range(1, 21)])[0][0] == 1
    listed = [step for step, _ in _losses([{"step": step, "eval_loss": 1.0} for step in range(1, 102)])]
    assert listed[-1] == 101 and len(listed) <= 20 and len({b - a for a, b in pairwise(listed)}) == 1


def test_a_scoring_that_failed_leaves_the_other_scores():
    """`LMEvalCallback.score` returns None then, and the card is written all the same."""
    from mars_hf.training.card import _scores

    assert list(_scores({"eval_loss": 1.0, "lm_eval": None})) == [("held-out text", "loss", 1.0, "the validation part")]
