"""A GPT-2 of a few thousand parameters and trainings of ten steps, for the tests of the Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mars_hf import MARSTrainer, MARSTrainingArguments

VOCAB, LENGTH, ROWS = 31, 8, 48


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.2)
    )


def rows():
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)]


def arguments(tmp_path, **kwargs):
    defaults = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "max_steps": 10,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "mars_ns_dtype": "float32",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-3},
        "warmup_steps": 3,
    }
    return MARSTrainingArguments(**{**defaults, **kwargs})


def train(args, model=None, resume=None, trainer_class=MARSTrainer, **kwargs):
    trainer = trainer_class(model=model or gpt2(), args=args, train_dataset=rows(), **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_same(left, right, tolerance=0.0):
    for name in left:
        # The gradient of the key bias is zero but for rounding, which AdamW blows up.
        a, b = ((t[:16], t[32:]) if "c_attn.bias" in name else (t,) for t in (left[name], right[name]))
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
