"""Trains, saves, and resumes under many engines, one after the other, on every rank of one launch:

    torchrun --nproc_per_node 2 tests/distributed/resume_worker.py cases.json results/

cases.json holds a list of {"name", "engine", "arguments"}: a key of RESUMABLE and fields of MARSTrainingArguments. A
case trains ten steps straight, then five that end in a checkpoint, then resumes from it; with "resume" it only resumes
from that checkpoint. Each rank leaves NAME.rankR.pt (what the trainings came to), rank 0 the checkpoints and the final
model in the folder NAME; a case that fails leaves NAME.rankR.error, its traceback.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engines import ENGINES, Engine, fsdp2, zero
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GPT2LMHeadModel, TrainerCallback
from worker import COMMON, SIZES, check_engine, forget, main, whole_parameters

from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.models import build_gpt2, gpt2_config

STEPS, HALF, GLOBAL_BATCH = 10, 5, 24
# For each optimizer another rule with the same param groups, whose state a careless resume would take over.
ANOTHER_RULE = {
    "mars": {"optim": "mars_lion"},
    "mars_lion": {"optim": "mars"},
    "mars_shampoo": {"optim": "mars"},
    "mars_m": {"optim": "mars", "mars_type": "moonlight"},
}


def fsdp2_as(state_dict_type: str, processes: int = 2) -> Engine:
    engine = fsdp2(processes)
    engine.arguments["fsdp_config"]["state_dict_type"] = state_dict_type
    return engine


WHOLE_WEIGHTS = {"stage3_gather_16bit_weights_on_model_save": True}
RESUMABLE = {
    **{name: ENGINES[name] for name in ("ddp", "zero0", "zero1", "zero2", "zero2-offload")},
    "fsdp2-sharded": fsdp2_as("SHARDED_STATE_DICT"),
    "fsdp2-sharded-1": fsdp2_as("SHARDED_STATE_DICT", processes=1),
    "fsdp2-full": fsdp2_as("FULL_STATE_DICT"),
    "zero3": zero(3, **WHOLE_WEIGHTS),
    "zero3-offload": zero(3, offload=True, **WHOLE_WEIGHTS),
}


class Vectors(nn.Module):
    """A model in which no rule of MARS finds a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.scale.sum() * input_ids.float().mean()}


class Watch(TrainerCallback):
    """Stops after HALF steps if told to, and keeps what training started from."""

    def __init__(self, stop: bool) -> None:
        self.stop, self.start, self.trainer = stop, None, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = snapshot(self.trainer)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self.stop and state.global_step == HALF


def gpt2() -> GPT2LMHeadModel:
    """With dropout, so that a resume must restore the random numbers of every rank."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return build_gpt2(gpt2_config(**SIZES, **dropout))


def snapshot(trainer) -> dict[str, Any]:
    """Whole parameters, and this rank's part of every state tensor; FSDP2's are whole, to compare world sizes."""
    optimizer = trainer.optimizer.optimizer if trainer.deepspeed is None else trainer.deepspeed.basic_optimizer
    state = {}
    # ZeRO-3 shows no parameters between steps, so they are counted in the order of the state.
    for i, values in enumerate(optimizer.state.values()):
        for name, value in values.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            state[f"{i}.{name}"] = value.detach().clone()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizer.param_groups]
    return {"parameters": whole_parameters(trainer), "state": state, "groups": groups}


def data() -> list[dict[str, Tensor]]:
    """Four steps an epoch, so that the checkpoint is in the middle of one."""
    shape = (4 * GLOBAL_BATCH, SIZES["n_positions"] - 1)
    ids = torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(engine: Engine, folder: Path, arguments: dict[str, Any], model=None, **kwargs) -> MARSTrainer:
    ours = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.3,
        "train_sampling_strategy": "random",
    }
    arguments = {**COMMON, **engine.arguments, **ours, **arguments}
    batch = GLOBAL_BATCH // engine.processes // 2
    args = MARSTrainingArguments(output_dir=str(folder), per_device_train_batch_size=batch, **arguments)
    return MARSTrainer(model=model or gpt2(), args=args, train_dataset=data(), **kwargs)


def train(engine: Engine, folder: Path, arguments: dict[str, Any], stop: bool = False, resume: Any = None):
    """One training; returns what it came to, with the trainer."""
    watch = Watch(stop)
    watch.trainer = trainer_of(engine, folder, arguments, callbacks=[watch])
    watch.trainer.train(resume_from_checkpoint=resume)
    check_engine(watch.trainer, engine)
    losses = [row["loss"] for row in watch.trainer.state.log_history if "loss" in row]
    return {**snapshot(watch.trainer), "losses": losses, "start": watch.start}, watch.trainer


def deepspeed_facts(trainer) -> dict[str, Any]:
    """What of the training arguments DeepSpeed was told, and what it trains with."""
    engine = trainer.deepspeed
    return {
        "clipping": engine.gradient_clipping(),
        "accumulation": engine.gradient_accumulation_steps(),
        "learning_rates": [group["lr"] for group in engine.optimizer.param_groups],
        "scheduled": trainer.lr_scheduler.get_last_lr(),
        "optimizer": type(engine.basic_optimizer).__name__,
    }


def run(case: dict, output: Path) -> None:
    engine = RESUMABLE[case["engine"]]
    folder, arguments = output / case["name"], case["arguments"]
    saving = {**arguments, "save_strategy": "steps", "save_steps": HALF}
    record, environment = {}, dict(os.environ)

    def finish(trainer) -> None:
        if engine.stage is not None:
            trainer.deepspeed.destroy()
        forget(environment)

    if "resume" in case:
        # Only the start: another number of ranks adds its gradients in another order.
        record["resumed"], trainer = train(engine, folder, saving, resume=case["resume"])
    else:
        try:
            trainer_of(engine, folder, arguments, model=Vectors()).train()
        except ValueError as error:
            record["no_matrix"] = str(error)
        forget(environment)
        record["straight"], trainer = train(engine, folder, arguments)
        finish(trainer)
        record["half"], trainer = train(engine, folder, saving, stop=True)
        if engine.stage is not None:
            record["deepspeed"] = deepspeed_facts(trainer)
        finish(trainer)
        record["resumed"], trainer = train(engine, folder, saving, resume=True)
        trainer.save_model(str(folder / "final"))
        finish(trainer)
        trainer = trainer_of(engine, folder, {**arguments, **ANOTHER_RULE[arguments["optim"]]})
        try:
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
        except ValueError as error:
            record["another_rule"] = str(error)
    torch.save(record, output / f"{case['name']}.rank{os.environ['RANK']}.pt")
    finish(trainer)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), run, RESUMABLE)
