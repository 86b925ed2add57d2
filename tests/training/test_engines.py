"""Engines that are not served are refused before the first step, and what no launch file says is set."""

import re

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import mars_hf
from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.training.checkpoints import NEEDED
from mars_hf.training.engines import engine_name, prepare_engine, replicas, running_format

ROWS = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8


@pytest.fixture(autouse=True)
def no_engine_is_left(monkeypatch):
    """An engine stays in the environment and in Accelerate's state: each test starts and ends with none."""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        # Set first, so that it is undone even if an engine sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=8, bos_token_id=0, eos_token_id=0, n_embd=8, n_layer=1, n_head=2)
    )


def trainer(tmp_path, stock=False, model=None, **settings):
    """A trainer that would train one step: MARSTrainer, or the stock one after register()."""
    settings = {"optim": "mars", "use_cpu": True, "max_steps": 1, "report_to": "none", **settings}
    if stock:
        mars_hf.register()
    arguments, cls = (TrainingArguments, Trainer) if stock else (MARSTrainingArguments, MARSTrainer)
    return cls(model=model or gpt2(), args=arguments(output_dir=str(tmp_path), **settings), train_dataset=ROWS)


def deepspeed(stage=2, **options):
    pytest.importorskip("deepspeed")
    zero = {"stage": stage, **options.pop("zero_optimization", {})}
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    return {"deepspeed": {**sizes, "gradient_clipping": "auto", "zero_optimization": zero, **options}}


def refused(it, message):
    """Refused by train(), with one line, and nothing was trained."""
    with pytest.raises(ValueError, match=message) as caught:
        it.train()
    assert "\n" not in str(caught.value)
    assert it.state.global_step == 0


ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
DEEPSPEED_OPTIONS = [
    ({"optimizer": ADAM}, "optimizer=.* DeepSpeed would build that optimizer instead of MARS, remove the block"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "optimizer=.*remove the block"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler=.*lr_scheduler_type and lr_1d, remove the block"),
    ({"pipeline": {"stages": 2}}, "pipeline=.*use ZeRO or FSDP2"),
    ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2.*use ZeRO-3 or FSDP2"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=True.*use bf16"),
    ({"checkpoint": {"load_universal": True}}, "universal checkpoints are not served"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}, "'nvme'.*offload to cpu"),
    ({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x"}}}, "'nvme'.*offload to cpu"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio=0.5.*leave it out"),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "compressed communication is not served"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size=2"),
    (
        {"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        "fp16 under DeepSpeed ZeRO-0 .*use ZeRO-1, or bf16",
    ),
    ({"gradient_clipping": 0.25}, r"gradient_clipping=0.25 would win over max_grad_norm=1.0, write .*auto"),
    ({"gradient_clipping": 0.0}, r"gradient_clipping=0.0 would win over max_grad_norm=1.0"),
]


@pytest.mark.parametrize(("options", "message"), DEEPSPEED_OPTIONS, ids=lambda value: re.sub(r"\W+", "-", str(value)))
@pytest.mark.parametrize("stock", [False, True], ids=["MARSTrainer", "stock"])
def test_deepspeed_options_that_are_refused(tmp_path, options, message, stock):
    if stock and "tensor_parallel" in options:
        pytest.skip("Accelerate makes a device mesh first, which takes several processes")
    refused(trainer(tmp_path, stock, **deepspeed(3, **options)), message)


@pytest.mark.parametrize("stock", [False, True], ids=["MARSTrainer", "stock"])
def test_a_deepspeed_configuration_without_clipping_is_refused(tmp_path, stock):
    config = deepspeed()
    del config["deepspeed"]["gradient_clipping"]
    refused(trainer(tmp_path, stock, **config), r"gradient_clipping=0.0 would win over max_grad_norm=1.0")


def test_a_deepspeed_configuration_that_is_served(tmp_path):
    offload = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}, "offload_param": {"device": "cpu"}}
    it = trainer(tmp_path, max_grad_norm=0.3, **deepspeed(3, zero_optimization=offload))
    prepare_engine(it.args, it.model)
    config = it.accelerator.state.deepspeed_plugin.deepspeed_config
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["gradient_clipping"] == 0.3
    assert engine_name() == running_format() == "DeepSpeed ZeRO-3" and running_format() in NEEDED
    assert replicas() is None


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_exact_mode_under_deepspeed_is_refused(tmp_path, stage):
    refused(trainer(tmp_path, is_approx=False, **deepspeed(stage)), "is_approx=False .*: launch DDP or FSDP2")


def test_another_optimizer_is_left_alone(tmp_path):
    it = trainer(tmp_path, optim="adamw_torch", **deepspeed(2, optimizer=ADAM))
    assert not it._optimizer_is_mars()
    assert "zero_force_ds_cpu_optimizer" not in it.accelerator.state.deepspeed_plugin.deepspeed_config


@pytest.mark.parametrize("stock", [False, True], ids=["MARSTrainer", "stock"])
def test_engines_that_accelerate_drops_without_a_word(tmp_path, monkeypatch, stock):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused(trainer(tmp_path, stock), "fsdp was asked for, but Accelerate runs something else")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    refused(trainer(tmp_path, stock, **deepspeed()), "deepspeed was asked for, .* on CPUs unset ACCELERATE_USE_CPU")


@pytest.mark.parametrize("stock", [False, True], ids=["MARSTrainer", "stock"])
def test_processes_that_would_each_train_alone(tmp_path, monkeypatch, stock):
    it = trainer(tmp_path, stock)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    refused(it, "WORLD_SIZE=2: these processes would each train alone, on CPUs add --use_cpu true")


def with_fsdp(it, mixed_precision="no", **settings):
    """Accelerate's state as on several GPUs; nothing is sharded before the check."""
    state, plugin = it.accelerator.state, FullyShardedDataParallelPlugin(**settings)
    state.fsdp_plugin, state._mixed_precision = plugin, mixed_precision
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    return plugin


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_version": 1}, "fsdp_version=1 flattens parameters, .*use fsdp_version 2"),
        ({"fsdp_version": 2, "mixed_precision": "fp16"}, "fp16 under FSDP2 is not served: use bf16"),
        ({"fsdp_version": 2, "cpu_offload": True}, "offloaded to CPUs is not served: use DeepSpeed ZeRO-3"),
    ],
    ids=["version 1", "fp16", "offload"],
)
def test_kinds_of_fsdp_that_are_refused(tmp_path, settings, message):
    it = trainer(tmp_path)
    with_fsdp(it, **settings)
    refused(it, message)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp2_adds_up_gradients_and_returns_losses_in_float32(tmp_path, kind):
    it = trainer(tmp_path)
    plugin = with_fsdp(it, "bf16", fsdp_version=2, state_dict_type=kind)
    prepare_engine(it.args, it.model)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert engine_name() == "FSDP2" and running_format() == f"FSDP {kind}" and running_format() in NEEDED


@pytest.mark.parametrize("dimension", ["tp", "cp", "dp_replicate"])
def test_more_than_one_dimension_of_parallelism_is_refused(tmp_path, dimension):
    it = trainer(tmp_path)
    it.args.parallelism_config = ParallelismConfig(**{f"{dimension}_size": 2})
    refused(it, f"{dimension}_size=2 is not served, shard in one dimension")


def test_other_ways_to_shard_are_refused(tmp_path, monkeypatch):
    it = trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(GPT2LMHeadModel, "is_distributed_loading_by_transformers", True)
        refused(it, "sharded while it was loaded")
    it.args.fsdp, it.args.fsdp_config = True, {"xla": True}
    refused(it, "xla=True is not served")


class Vectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input_ids, labels):
        return {"loss": self.scale.sum()}


@pytest.mark.parametrize("stock", [False, True], ids=["MARSTrainer", "stock"])
def test_a_model_without_matrices_is_refused(tmp_path, stock):
    refused(trainer(tmp_path, stock, model=Vectors()), "nothing is left for mars_type='mars-adamw'")


def test_a_launch_file_says_the_precision(tmp_path, monkeypatch):
    """DeepSpeed compares its own setting, which comes from the launch file, with the argument."""
    assert not trainer(tmp_path).args.bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = trainer(tmp_path).args
    assert args.bf16 and not args.fp16 and args.mixed_precision == "bf16"


def test_cpus_are_used_where_there_is_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args, **kwargs: False)
    assert MARSTrainingArguments(output_dir=str(tmp_path)).use_cpu


def test_one_process_is_served(tmp_path):
    it = trainer(tmp_path)
    it.train()
    assert engine_name() == "one process" and running_format() == "one process or DDP" and replicas() is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["global_step4/mp_rank_00_model_states.pt", "latest"], "was saved by DeepSpeed ZeRO-0, this is one process"),
        (["pytorch_model_fsdp.bin", "optimizer.bin"], "was saved by FSDP FULL_STATE_DICT, this is one process"),
        (["model.safetensors"], "optimizer.pt is missing"),
    ],
    ids=["ZeRO", "FSDP", "incomplete"],
)
def test_checkpoints_that_cannot_be_resumed_are_refused_before_anything_is_loaded(tmp_path, files, message):
    checkpoint = tmp_path / "checkpoint-4"
    for name in [*files, "trainer_state.json", "scheduler.pt"]:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("{}")
    it = trainer(tmp_path)
    with pytest.raises(ValueError, match=message):
        it.train(resume_from_checkpoint=str(checkpoint))
    if "missing" in message:
        with pytest.raises(ValueError, match="no complete checkpoint"):
            it.train(resume_from_checkpoint=True)
