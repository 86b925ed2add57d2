"""Trains many cases one after the other, on every rank of one launch:

    torchrun --nproc_per_node 2 tests/distributed/worker.py cases.json results/

cases.json holds a list of {"name", "engine", "arguments", "model", "events"}: a key of ENGINES, fields of
MARSTrainingArguments, arguments of `build_model` and fields of `Events`. Rank 0 leaves NAME.safetensors, the whole
parameters after the last step, and NAME.json, the Trainer's log and what the clips did; a case that fails leaves
NAME.rankR.error, its traceback.
"""

import gc
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import fsdp_on_cpu
import scoring
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from engines import ENGINES, Engine
from memory_gauge import MemoryGauge
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.models import build_gpt2, gpt2_config
from mars_hf.optim import compiled

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 10, 24, 10, 101
# Vocabulary, width and positions divide neither by 2 nor by 3.
SIZES = {"n_layer": 2, "n_head": 5, "n_embd": 25, "vocab_size": VOCABULARY, "n_positions": LENGTH + 1}
COMMON = {
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    # A gradient that is nothing but rounding noise would otherwise become an update of the size of lr.
    "adam_epsilon": 1e-6,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
}


@dataclass(frozen=True)
class Events:
    """What happens at some steps, counted from 0.

    Args:
        infinite_loss: step at which the last rank's loss is infinite.
        lost_batch: step whose global batch is taken out of the data.
        bypassed: steps at which no parameter of the last block takes part.
        scored: after so many steps, and again after as many, lm-eval scores the model.
    """

    infinite_loss: int | None = None
    lost_batch: int | None = None
    bypassed: Sequence[int] = ()
    scored: int | None = None


class EventfulTrainer(MARSTrainer):
    """A MARSTrainer to which the `Events` happen."""

    events = Events()

    def compute_loss(self, model, inputs, *args, **kwargs):
        step, last_rank = self.state.global_step, self.args.process_index == self.args.world_size - 1
        block = self.accelerator.unwrap_model(model).transformer.h[-1]
        if step in self.events.bypassed:
            block.forward = lambda hidden_states, *args, **kwargs: hidden_states
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        block.__dict__.pop("forward", None)
        return loss * math.inf if step == self.events.infinite_loss and last_rank else loss


class ClipWitness(TrainerCallback):
    """Computes on one process, from the gradients alone, how many tensors the per-tensor clip shortens at each step."""

    def __init__(self) -> None:
        self.shortened: list[list[int]] = []
        self._last: dict[Tensor, Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        counts = [0, 0]
        for group in optimizer.param_groups:
            if not group.get("rule", "").startswith("mars-") or group["clip_c"] is None:
                continue
            beta1 = group["betas"][0]
            for p in (p for p in group["params"] if p.grad is not None):
                last = self._last.get(p, torch.zeros_like(p))
                c = p.grad + group["gamma"] * beta1 / (1 - beta1) * (p.grad - last)
                counts[bool(c.norm() > group["clip_c"])] += 1
                self._last[p] = p.grad.clone()
        self.shortened.append(counts)


def build_model(
    folder: Path | None = None,
    *,
    bias: bool = False,
    frozen: Sequence[str] = (),
    zero_init: bool = False,
    n_embd: int = SIZES["n_embd"],
):
    """The test model: with the same arguments the same weights on every rank and in every launch.

    Args:
        folder: where `zero_init` may write a checkpoint.
        bias: biases train.
        frozen: names of parameters that do not train.
        zero_init: loaded by `from_pretrained`, which builds it in shards where the training arguments ask for ZeRO-3.
        n_embd: its width.
    """
    torch.manual_seed(0)
    model = build_gpt2(gpt2_config(**{**SIZES, "n_embd": n_embd}), bias=bias)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if zero_init:
        trains = {name: p.requires_grad for name, p in model.named_parameters()}
        # save_pretrained writes on the first rank alone.
        save_file(dict(model.named_parameters()), folder / "model.safetensors", {"format": "pt"})
        model.config.save_pretrained(folder)
        model = GPT2LMHeadModel.from_pretrained(folder)
        # Without it the Trainer counts one label too many in each sequence, and the gradients come out smaller.
        model.loss_type = "ForCausalLM"
        for name, p in model.named_parameters():
            if not hasattr(p, "ds_id"):
                raise RuntimeError(f"{name} was not built under zero.Init")
            p.requires_grad_(trains[name])
    return model


def data(lost_batch: int | None) -> list[dict[str, Tensor]]:
    """One global batch after the other, from few tokens or many, so that the norms of their gradients differ."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(VOCABULARY // (1 + step % 3 * 4), (GLOBAL_BATCH, LENGTH), generator=generator)
        for step in range(STEPS)
    ]
    if lost_batch is not None:
        del batches[lost_batch]
    return [{"input_ids": row, "labels": row} for row in torch.cat(batches)]


def check(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"the engine is not what it claims to be: {what}")


def check_engine(trainer, engine: Engine) -> None:
    """Raises unless the training that just ran was that of `engine`: most ways to misconfigure one are silent."""
    state, wrapped = trainer.accelerator.state, trainer.model_wrapped
    check(state.distributed_type == engine.distributed_type, f"distributed_type {state.distributed_type}")
    check(trainer.args.world_size == state.num_processes == engine.processes, f"{state.num_processes} processes")
    check(engine.processes == (dist.get_world_size() if dist.is_initialized() else 1), "size of the process group")
    check(isinstance(wrapped, DistributedDataParallel) == (engine.distributed_type == "MULTI_CPU"), "DDP")
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    sharded = [isinstance(p, DTensor) for p in [*trainer.model.parameters(), *trained]]
    check(all(sharded) if engine.distributed_type == "FSDP" else not any(sharded), "DTensor parameters")
    if engine.distributed_type == "FSDP":
        check(all(p.placements == (Shard(0),) for p in trained), "placements")
    if engine.bucket_view:
        check(wrapped.gradient_as_bucket_view, "gradient_as_bucket_view")
    if engine.stage is not None:
        check(wrapped.zero_optimization_stage() == engine.stage, f"stage {wrapped.zero_optimization_stage()}")
        wrapper = type(wrapped.optimizer).__name__
        check(engine.wrapper in ("", wrapper), f"wrapper {wrapper}")
        check(bool(wrapped.zero_cpu_offload()) == engine.offload, "offload")
        partitioned = [getattr(p, "ds_numel", 0) > p.numel() for p in wrapped.module.parameters()]
        check(all(partitioned) if engine.stage == 3 else not any(partitioned), "ZeRO-3 parameters")
        flat = [p.ndim == 1 for p in trained]
        check(all(flat) if engine.stage > 0 else not all(flat), "flat partitions in the optimizer")


def whole_parameters(trainer) -> dict[str, Tensor]:
    """The trained parameters, gathered from all ranks, in float32: the master weights where there are some."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {name: whole(p, trainer).detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def whole(p: Tensor, trainer) -> Tensor:
    """One parameter in float32; a collective."""
    if isinstance(p, DTensor):
        return p.full_tensor()
    if not hasattr(p, "ds_id") and p.dtype == torch.float32:
        return p
    from deepspeed.utils import safe_get_full_fp32_param

    optimizer = trainer.deepspeed.optimizer
    if trainer.deepspeed.zero_optimization_stage() > 0:
        master = safe_get_full_fp32_param(p)
    else:
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups)
        master = next(high for lows, highs in groups for low, high in zip(lows, highs) if low is p)
    if master is None:
        raise RuntimeError(f"DeepSpeed knows no float32 weights of a parameter of shape {tuple(p.shape)}")
    return master


def run(case: dict, output: Path) -> None:
    """Trains one case and, on rank 0, writes what came of it."""
    if case["measured"]:
        train(case)  # what is imported on the way must not count
        forget(dict(os.environ))
    with MemoryGauge() as gauge:
        trainer, witness, scores = train(case)
    check_engine(trainer, ENGINES[case["engine"]])
    whole = whole_parameters(trainer)
    if trainer.is_world_process_zero():
        save_file(whole, output / f"{case['name']}.safetensors")
        facts = {
            "log": trainer.state.log_history,
            "shortened": witness.shortened,
            "scores": scores,
            "bytes": gauge.most,
        }
        (output / f"{case['name']}.json").write_text(json.dumps(facts))
    if ENGINES[case["engine"]].stage is not None:
        trainer.deepspeed.destroy()


def train(case: dict) -> tuple[EventfulTrainer, ClipWitness, dict | None]:
    """Trains one case; with the facts of its scores, if any."""
    engine = ENGINES[case["engine"]]
    arguments = {**COMMON, **engine.arguments, **case["arguments"]}
    batch, rest = divmod(GLOBAL_BATCH, engine.processes * arguments.get("gradient_accumulation_steps", 1))
    check(rest == 0, f"a global batch of {GLOBAL_BATCH} sequences")
    with tempfile.TemporaryDirectory() as folder:
        # The arguments come first: under ZeRO-3 they decide how from_pretrained builds the model.
        args = MARSTrainingArguments(output_dir=folder, per_device_train_batch_size=batch, **arguments)
        model = build_model(Path(folder), **case["model"])
        witness = ClipWitness()
        callbacks = [witness] if engine.processes == 1 and not case["measured"] else []
        events = Events(**case["events"])
        trainer = EventfulTrainer(model=model, args=args, train_dataset=data(events.lost_batch), callbacks=callbacks)
        trainer.events = events
        if events.scored:
            scoring.add_callback(trainer, events.scored)
        if engine.bucket_view:
            trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
        trainer.train()
        scores = scoring.facts(trainer, Path(folder)) if events.scored else None
    return trainer, witness, scores


def forget(environment: dict[str, str]) -> None:
    """Undoes what a Trainer leaves behind in the process, so that the next one may use another engine."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()


def main(
    cases: list[dict],
    output: Path,
    run: Callable[[dict, Path], None] = run,
    engines: Mapping[str, Engine] = ENGINES,
) -> None:
    """Runs every case on this rank, and does not return.

    Args:
        cases: each with a `name` and an `engine`.
        output: where a failed case leaves its traceback.
        run: trains one case and leaves its results.
        engines: by name.
    """
    torch.set_num_threads(1)
    compiled.SMALL = 2  # with mars_fused even these tensors go through the compiled functions
    rank, launched = int(os.environ.get("RANK", 0)), "RANK" in os.environ
    fsdp_on_cpu.enable()
    # A rank that fails alone must not leave the others waiting for half an hour.
    patience = timedelta(seconds=60)
    if any(engines[case["engine"]].stage is not None for case in cases):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # Compiling it takes minutes on a new machine, and training does not use it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # On GPUs accelerate does this; on CPUs zero.Init would find a single process.
        deepspeed.init_distributed("gloo", timeout=patience)
    elif launched:
        dist.init_process_group("gloo", timeout=patience)
    environment = dict(os.environ)
    # Each training collects garbage twice; going through everything that was imported takes longer than the training.
    gc.freeze()
    for case in cases:
        try:
            run(case, output)
        except Exception:
            (output / f"{case['name']}.rank{rank}.error").write_text(traceback.format_exc())
        forget(environment)
    if launched:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo now and then aborts while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
