"""The recipe under every launch file, as it is but for what a GPU would be: two processes on CPUs over gloo."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mars_hf.training.checkpoints import check_complete, saved_format

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ON_CPU, RECIPE = "tests/distributed/on_cpu.py", "recipes/pretrain_gpt2.py"
# The loss falls from 5.7 to 4.9 in four steps; the global batch is 8 sequences under every file.
SETTINGS = (
    "--use_cpu true --max_steps 4 --block_size 16 --n_layer 1 --n_head 2 --n_embd 32 --vocab_size 301 --cpu_threads 1 "
    "--learning_rate 2e-2 --warmup_steps 0 --gradient_accumulation_steps 2 --eval_strategy steps --eval_steps 2 "
    "--save_steps 2 --logging_steps 1 --optim mars_m --lm_eval_tasks arc_easy --lm_eval_limit 1 --sample_tokens 4"
)
# Launch file: how the recipe names the engine, the format of its checkpoints, and the type of the final weights.
ENGINES = {
    "single": ("one process", "one process or DDP", torch.float32),
    "ddp": ("DDP", "one process or DDP", torch.float32),
    "fsdp2": ("FSDP2", "FSDP SHARDED_STATE_DICT", torch.float32),
    "zero1": ("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-1 or 2", torch.bfloat16),
    "zero2": ("DeepSpeed ZeRO-2", "DeepSpeed ZeRO-1 or 2", torch.bfloat16),
    "zero3": ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", torch.bfloat16),
    "zero3_offload": ("DeepSpeed ZeRO-3", "DeepSpeed ZeRO-3", torch.bfloat16),
}


def arguments(output, corpus, processes):
    given = f"--per_device_train_batch_size {4 // processes} --dataset_path {corpus} --output_dir {output}"
    return [*SETTINGS.split(), *given.split()]


@pytest.fixture(scope="module")
def trained(launch, corpus, tmp_path_factory):
    """Runs a launch file once; returns the output folder and what was printed."""
    done = {}

    def run(name):
        if name not in done:
            if name.startswith("zero"):
                pytest.importorskip("deepspeed")
            output, processes = tmp_path_factory.mktemp(name), 1 if name == "single" else 2
            config = ["--config_file", f"accelerate_configs/{name}.yaml", "--num_processes", processes]
            printed = launch(*config, ON_CPU, RECIPE, *arguments(output, corpus, processes), timeout=300).stdout
            done[name] = output, printed
        return done[name]

    return run


@pytest.mark.parametrize("name", ENGINES)
def test_the_recipe_runs_under_every_launch_file(trained, name):
    (output, printed), (engine, written, dtype) = trained(name), ENGINES[name]
    processes = 1 if name == "single" else 2
    assert f"{processes} process(es), {engine}\n" in printed
    results = json.loads((output / "results.json").read_text())
    assert results["sample"] and set(results["lm_eval"]["tasks"]) == {"arc_easy"}
    assert saved_format(output / "checkpoint-2") == written
    check_complete(str(output / "checkpoint-4"))
    weights = load_file(output / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "single"])
def test_training_is_that_of_one_process(trained, name):
    """The loss falls by 0.8. FSDP2 and ZeRO compute with bfloat16 weights (8 bits), the others round products only."""
    (one, _), (many, _) = trained("single"), trained(name)
    state, expected = (json.loads((o / "checkpoint-4" / "trainer_state.json").read_text()) for o in (many, one))
    losses, wanted = ([row["eval_loss"] for row in s["log_history"] if "eval_loss" in row] for s in (state, expected))
    assert len(losses) == len(wanted) == 2
    assert wanted[0] - wanted[1] > 0.3
    # Measured: 0.004.
    assert losses == pytest.approx(wanted, abs=0.01)


def test_multi_node_on_two_ports_of_one_machine(corpus, tmp_path):
    """Both machines are this one, so they share the folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    config = f"--config_file accelerate_configs/multi_node.yaml --num_processes 2 --main_process_port {port}".split()
    logs = [tmp_path / f"machine{rank}.log" for rank in (0, 1)]
    machines = []
    for rank, log in enumerate(logs):
        place = ["--main_process_ip", "127.0.0.1", "--machine_rank", str(rank)]
        command = [*accelerate, *config, *place, ON_CPU, RECIPE, *arguments(tmp_path / "run", corpus, 2)]
        with log.open("w") as stream:
            machines.append(subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream))
    try:
        codes = [machine.wait(timeout=300) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in printed)
    assert "2 process(es), DDP\n" in printed[0] and "process(es)" not in printed[1]
    assert load_file(tmp_path / "run" / "final" / "model.safetensors")


def test_every_launch_file_is_exercised():
    # tests/distributed/test_ddp.py trains under ddp_cpu.
    assert {path.stem for path in FILES} == {*ENGINES, "ddp_cpu", "multi_node"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_headers_say_when_at_what_cost_and_how(path):
    header = "".join(re.findall(r"^#.*\n", path.read_text(), flags=re.MULTILINE))
    assert path.read_text().startswith("# ")
    assert re.search(r"Memory, mars-adamw\b.*\bbytes? a parameter", " ".join(header.replace("#", "").split()))
    assert f"accelerate launch --config_file accelerate_configs/{path.name}" in header
    settings = yaml.safe_load(path.read_text())
    assert settings["mixed_precision"] == ("no" if path.stem == "ddp_cpu" else "bf16")
    if settings["distributed_type"] == "DEEPSPEED":
        for name in ("gradient_clipping", "gradient_accumulation_steps"):
            assert settings["deepspeed_config"][name] == "auto"
