"""Two processes over gloo, started as a user starts them, against one process with the same global batch."""

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

SETTINGS = (
    "--max_steps 10 --block_size 32 --n_layer 2 --n_head 2 --n_embd 36 --vocab_size 301 --learning_rate 3e-3 "
    "--warmup_steps 2 --eval_strategy no --save_strategy no --logging_steps 1 --sample_tokens 0 --cpu_threads 1 "
    "--mars_ns_dtype float32 --max_grad_norm 0.2 --lm_eval_tasks none"
)


def train(launch, output, corpus, optim, batch, *config, accumulate=1):
    settings = [*SETTINGS.split(), "--optim", optim, "--output_dir", output, "--dataset_path", corpus]
    settings += ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulate]
    done = launch(*config, "recipes/pretrain_gpt2.py", *settings)
    return done.stdout, load_file(output / "final" / "model.safetensors")


@pytest.mark.parametrize(("optim", "tolerance"), [("mars_adamw", 1e-6), ("mars_m", 2e-5)])
def test_two_processes_equal_one(launch, tmp_path, corpus, root, optim, tolerance):
    config = ("--config_file", root / "accelerate_configs" / "ddp_cpu.yaml")
    _, one = train(launch, tmp_path / "one", corpus, optim, 8)
    output, two = train(launch, tmp_path / "two", corpus, optim, 4, *config)
    assert "2 process(es)" in output
    assert one.keys() == two.keys()
    for name in one:
        assert_close(two[name], one[name], rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
