"""Save and resume under every engine, and what else its checkpoints and final models must be good for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from mars_hf.training.checkpoints import NEEDED, check_complete, check_format, saved_format

WORKER = Path(__file__).with_name("resume_worker.py")
SHARDED, FULL = "FSDP SHARDED_STATE_DICT", "FSDP FULL_STATE_DICT"
# name: engine, arguments, the format of its checkpoints.
CASES = {
    "ddp": ("ddp", {"optim": "mars_m"}, "one process or DDP"),
    "ddp-exact": ("ddp", {"optim": "mars", "is_approx": False}, "one process or DDP"),
    "fsdp2-exact": ("fsdp2-sharded", {"optim": "mars", "is_approx": False}, SHARDED),
    "fsdp2-sharded": ("fsdp2-sharded", {"optim": "mars", "mars_last_grad_dtype": "bfloat16"}, SHARDED),
    "fsdp2-sharded-bf16": ("fsdp2-sharded", {"optim": "mars_m", "bf16": True}, SHARDED),
    "fsdp2-full": ("fsdp2-full", {"optim": "mars_shampoo"}, FULL),
    "zero0": ("zero0", {"optim": "mars_m"}, "DeepSpeed ZeRO-0"),
    "zero0-bf16": ("zero0", {"optim": "mars", "bf16": True}, "DeepSpeed ZeRO-0"),
    "zero1": ("zero1", {"optim": "mars_lion"}, "DeepSpeed ZeRO-1 or 2"),
    "zero1-bf16": ("zero1", {"optim": "mars", "bf16": True}, "DeepSpeed ZeRO-1 or 2"),
    "zero2-bf16": ("zero2", {"optim": "mars_m", "bf16": True}, "DeepSpeed ZeRO-1 or 2"),
    "zero2-offload": ("zero2-offload", {"optim": "mars"}, "DeepSpeed ZeRO-1 or 2"),
    "zero3": ("zero3", {"optim": "mars", "mars_last_grad_dtype": "bfloat16"}, "DeepSpeed ZeRO-3"),
    "zero3-bf16": ("zero3", {"optim": "mars_m", "bf16": True}, "DeepSpeed ZeRO-3"),
    "zero3-offload": ("zero3-offload", {"optim": "mars_shampoo"}, "DeepSpeed ZeRO-3"),
}


def launch_worker(folder: Path, cases: list[dict], processes: int) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(WORKER), str(folder / "cases.json"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("resume")
    cases = [{"name": name, "engine": engine, "arguments": given} for name, (engine, given, _) in CASES.items()]
    launch_worker(folder, cases, processes=2)
    return folder


def record(folder, name, rank=0):
    error = folder / f"{name}.rank{rank}.error"
    assert not error.exists(), error.read_text()
    return torch.load(folder / f"{name}.rank{rank}.pt", weights_only=False)


def assert_identical(actual, expected, what):
    assert actual.keys() == expected.keys(), what
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, f"{what}: {name}"
        assert_close(actual[name], expected[name], rtol=0, atol=0, msg=lambda m, name=name: f"{what}: {name}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_resume_continues_bit_for_bit(folder, name):
    for rank in (0, 1):
        run = record(folder, name, rank)
        straight, half, resumed = run["straight"], run["half"], run["resumed"]
        assert straight["state"], "the optimizer has state to compare"
        assert len(straight["losses"]) == len(resumed["losses"]) == 10
        assert resumed["losses"] == straight["losses"]
        assert_identical(resumed["start"]["parameters"], half["parameters"], "parameters as loaded")
        assert_identical(resumed["start"]["state"], half["state"], "state as loaded")
        assert_identical(resumed["parameters"], straight["parameters"], "parameters")
        assert_identical(resumed["state"], straight["state"], "state")
        assert any(not torch.equal(half["parameters"][n], p) for n, p in resumed["parameters"].items())


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_are_recognised_and_complete(folder, name):
    checkpoint, (_, _, written) = folder / name / "checkpoint-5", CASES[name]
    assert saved_format(checkpoint) == written
    check_complete(str(checkpoint))
    bf16 = "bf16" in name
    check_format(str(checkpoint), written, processes=2, bf16=bf16)
    for other in NEEDED:
        if other != written:
            with pytest.raises(ValueError, match=f"was saved by {written}, this is {other}: launch it as"):
                check_format(str(checkpoint), other, processes=2, bf16=bf16)


def test_zero_reads_neither_another_number_of_partitions_nor_another_precision(folder):
    checkpoint, saved = str(folder / "zero3" / "checkpoint-5"), "ZeRO-3 on 2 processes without bf16"
    with pytest.raises(ValueError, match=f"{saved}, this is DeepSpeed ZeRO-3 on 4 processes without bf16"):
        check_format(checkpoint, "DeepSpeed ZeRO-3", processes=4, bf16=False)
    with pytest.raises(ValueError, match=f"{saved}, this is DeepSpeed ZeRO-3 on 2 processes with bf16"):
        check_format(checkpoint, "DeepSpeed ZeRO-3", processes=2, bf16=True)


@pytest.mark.parametrize("name", CASES)
def test_a_missing_file_is_named(folder, name):
    """Every file that training needs, on every rank, is missed when it is gone."""
    checkpoint = folder / name / "checkpoint-5"
    files = [
        path
        for path in checkpoint.rglob("*")
        if path.suffix in (".pt", ".distcp", ".bin") or path.name in (".metadata", "latest", "trainer_state.json")
    ]
    # One rank or two; the model's safetensors are for from_pretrained, training_args.bin and random numbers are extra.
    needed = [path for path in files if path.name != "training_args.bin"]
    assert len(needed) >= 3
    for path in needed:
        hidden = path.rename(path.with_name("hidden"))
        try:
            with pytest.raises(ValueError, match="is missing"):
                check_complete(str(checkpoint))
        finally:
            hidden.rename(path)


@pytest.mark.parametrize("name", CASES)
def test_final_model_for_from_pretrained(folder, name):
    """The trained weights, in bfloat16 where the engine computes with bfloat16 weights (ZeRO)."""
    model, loaded = AutoModelForCausalLM.from_pretrained(folder / name / "final", output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"], loaded
    trained = record(folder, name)["resumed"]["parameters"]
    dtype = torch.bfloat16 if name.startswith("zero") and name.endswith("bf16") else torch.float32
    weights = dict(model.named_parameters())
    assert trained.keys() < weights.keys()
    assert_identical({n: weights[n].detach() for n in trained}, {n: p.to(dtype) for n, p in trained.items()}, "weights")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("zero1", "zero2", "zero3"))])
def test_zero_to_fp32_gives_the_trained_weights(folder, name):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / name / "checkpoint-10"))
    trained = record(folder, name)["resumed"]["parameters"]
    assert_identical({n: weights[n] for n in trained}, trained, "weights")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("zero")])
def test_training_arguments_reach_deepspeed(folder, name):
    facts = record(folder, name)["deepspeed"]
    assert facts["optimizer"] == "MARS"
    assert facts["clipping"] == 0.3 and facts["accumulation"] == 2
    assert facts["learning_rates"] == facts["scheduled"]
    assert min(facts["learning_rates"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_a_model_without_matrices_is_refused(folder, name):
    for rank in (0, 1):
        assert "nothing is left for mars_type" in record(folder, name, rank)["no_matrix"]


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_another_rule_is_refused(folder, name):
    for rank in (0, 1):
        assert "rule of the saved param groups is" in record(folder, name, rank)["another_rule"]


def test_fsdp2_shards_of_two_processes_load_on_one(folder, tmp_path):
    checkpoint = folder / "fsdp2-sharded" / "checkpoint-5"
    _, given, _ = CASES["fsdp2-sharded"]
    case = {"name": "alone", "engine": "fsdp2-sharded-1", "arguments": given, "resume": str(checkpoint)}
    launch_worker(tmp_path, [case], processes=1)
    alone, half = record(tmp_path, "alone")["resumed"], record(folder, "fsdp2-sharded")["half"]
    assert_identical(alone["start"]["parameters"], half["parameters"], "parameters as loaded")
    assert_identical(alone["start"]["state"], half["state"], "state as loaded")
    assert len(alone["losses"]) == 10
