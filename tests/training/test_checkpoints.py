"""Which checkpoint can be resumed."""

import pytest

from mars_hf.training.checkpoints import NEEDED, WHOLE, checkpoint_to_resume, last_checkpoint


def checkpoint(folder, step, without=()):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for name in NEEDED[WHOLE]:
        if name not in without:
            (path / name).write_text(f'{{"global_step": {step}}}' if name.endswith(".json") else "")
    return str(path)


def test_newest_complete_checkpoint_by_step(tmp_path):
    assert last_checkpoint(tmp_path / "nothing") is None
    checkpoint(tmp_path, 20)
    newest = checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200, without=["trainer_state.json"])  # interrupted while it was written
    (tmp_path / "checkpoint-final").mkdir()
    assert last_checkpoint(tmp_path) == newest
    assert checkpoint_to_resume("true", tmp_path) == newest


def test_a_fresh_run_does_not_mix_with_another(tmp_path):
    assert checkpoint_to_resume(None, tmp_path) is None
    checkpoint(tmp_path, 20)
    with pytest.raises(ValueError, match="holds a run up to checkpoint-20"):
        checkpoint_to_resume(None, tmp_path)


def test_a_finished_run_is_not_resumed(tmp_path):
    newest = checkpoint(tmp_path, 20)
    assert checkpoint_to_resume("true", tmp_path, 21) == newest
    with pytest.raises(ValueError, match="all 20 steps are done"):
        checkpoint_to_resume("true", tmp_path, 20)


def test_what_cannot_be_resumed_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        checkpoint_to_resume("true", tmp_path)
    path = checkpoint(tmp_path, 20, without=["optimizer.pt"])
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing"):
        checkpoint_to_resume(path, tmp_path)
