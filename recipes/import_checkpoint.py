"""Turns a nanoGPT-style ckpt.pt into a checkpoint of transformers, and its MARS state into one that can be resumed.

    python recipes/import_checkpoint.py --checkpoint out/ckpt.pt --output_dir runs/imported --tokenizer_name gpt2

With MARS state it writes checkpoint-STEP/ and resume.yaml, and prints the command that goes on with the training:

    accelerate launch recipes/pretrain_gpt2.py --config runs/imported/resume.yaml --dataset_name openwebtext
"""

import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import GPT2LMHeadModel, PreTrainedTokenizerBase

from mars_hf import MARSTrainer, MARSTrainingArguments
from mars_hf.data.tokenizer import load_tokenizer
from mars_hf.models.nanogpt import is_transposed, model_from_nanogpt, nanogpt_weights, read_nanogpt
from mars_hf.optim.hyper import Hyper
from mars_hf.optim.rules import state_names
from mars_hf.training.authors import converted, decays_embeddings, parameter_names, settings_of, why_not_convertible
from mars_hf.training.config import parse_config


@dataclass
class ImportArguments:
    checkpoint: str = field(metadata={"help": "The ckpt.pt of nanoGPT, train_mars.py or train_mars_m.py."})
    output_dir: str = field(metadata={"help": "Folder to write; must not hold anything yet."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer on the hub or in a folder, to be saved beside the model."}
    )
    activation_function: str | None = field(
        default=None,
        metadata={
            "help": "gelu_pytorch_tanh or gelu (exact), which no checkpoint says. Default: tanh where model_args know "
            "scale_attn_by_inverse_layer_idx (the MARS authors), else exact (nanoGPT since June 2023)."
        },
    )
    micro_batches: int | None = field(
        default=None,
        metadata={
            "help": "Losses of how many micro-batches were added up, not averaged, in each step of each process. "
            "Default: gradient_accumulation_steps of the checkpoint's config; 8 times that if train_mars.py ran alone."
        },
    )
    weights_only: bool = field(default=False, metadata={"help": "Leave the optimizer out."})


def main() -> None:
    (given,) = parse_config([ImportArguments])
    output = Path(given.output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output_dir={given.output_dir!r} holds something already: choose another or remove it")
    if given.activation_function not in (None, "gelu", "gelu_pytorch_tanh", "gelu_new"):
        raise ValueError(f"activation_function={given.activation_function!r} must be gelu_pytorch_tanh or gelu")
    if given.micro_batches is not None and given.micro_batches < 1:
        raise ValueError(f"micro_batches={given.micro_batches} must be 1 or more")
    checkpoint = read_nanogpt(given.checkpoint)
    model = model_from_nanogpt(checkpoint, activation_function=given.activation_function)
    tokenizer = fitting_tokenizer(given.tokenizer_name, model) if given.tokenizer_name else None
    left_out = "--weights_only" if given.weights_only else why_not_convertible(checkpoint.get("optimizer"))

    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that nothing half-written is ever found there.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        written = Path(folder) / "import"
        settings = None if left_out else resumable(checkpoint, model, tokenizer, given, written)
        place = written if settings is None else written / f"checkpoint-{int(checkpoint['iter_num'])}"
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        if settings is not None:
            (written / "resume.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        if output.exists():
            output.rmdir()
        os.rename(written, output)

    biases = "no biases" if has_no_biases(model) else "biases"
    print(
        f"{output / place.relative_to(written)}: {model.num_parameters():,} parameters, {biases}, vocabulary "
        f"{model.config.vocab_size:,}, activation {model.config.activation_function}"
    )
    if settings is None:
        print(f"weights only, without optimizer: {left_out}")
    else:
        print(
            f"{settings['optim']} after {checkpoint['iter_num']:,} steps, the losses of "
            f"{settings['gradient_accumulation_steps']} micro-batches averaged instead of added up; to go on:"
        )
        print(f"  accelerate launch recipes/pretrain_gpt2.py --config {output / 'resume.yaml'} --dataset_name YOURS")


def has_no_biases(model: GPT2LMHeadModel) -> bool:
    """Whether the biases are frozen zeros."""
    return not model.transformer.ln_f.bias.requires_grad


def fitting_tokenizer(name: str, model: GPT2LMHeadModel) -> PreTrainedTokenizerBase:
    """The tokenizer, whose special tokens become those of the model.

    Raises:
        ValueError: it cannot be loaded, or has more tokens than the model.
    """
    tokenizer = load_tokenizer(name)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"tokenizer_name={name!r} has {len(tokenizer):,} tokens, the model {model.config.vocab_size:,}: give the "
            "one it was trained with"
        )
    for part in (model.config, model.generation_config):
        part.bos_token_id, part.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return tokenizer


def resumable(
    checkpoint: dict[str, Any],
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerBase | None,
    given: ImportArguments,
    written: Path,
) -> dict[str, Any]:
    """Writes optimizer, schedule and step count into `written`, and returns the settings to resume with."""
    if "iter_num" not in checkpoint:
        raise ValueError("checkpoint: it has no iter_num, the steps that were taken: pass --weights_only true")
    saved, weights, step = checkpoint["optimizer"], nanogpt_weights(checkpoint), int(checkpoint["iter_num"])
    names = parameter_names(saved, weights)
    settings = settings_of(checkpoint, given.micro_batches)
    settings["mars_decay"] = "trainer" if decays_embeddings(saved, names) else "authors"
    folder = written / f"checkpoint-{step}"
    folder.mkdir(parents=True)

    # The Trainer of the resumed run builds its param groups in the same way.
    args = MARSTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **settings)
    trainer = MARSTrainer(model=model, args=args)
    optimizer = trainer.create_optimizer()
    by_name = {name: i for i, name in names.items()}
    name_of = {id(p): name for name, p in model.named_parameters()}
    k = settings["gradient_accumulation_steps"]
    for group in optimizer.param_groups:
        wanted = state_names(Hyper.of(group))
        for p in group["params"]:
            name = name_of[id(p)]
            state = saved["state"][by_name[name]]
            tensors = converted(state, tuple(n for n in wanted if n != "step"), k)
            transposed = is_transposed(name)
            optimizer.state[p] = {n: t.T.contiguous() if transposed else t for n, t in tensors.items()}
            if "step" in wanted:
                optimizer.state[p]["step"] = torch.tensor(float(state["step"]))
    scheduler = trainer.create_scheduler(args.max_steps, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the steps before this one were taken elsewhere
        scheduler.last_epoch = step - 1
        scheduler.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    trainer.state.global_step, trainer.state.max_steps = step, args.max_steps
    trainer.state.train_batch_size = args.per_device_train_batch_size
    trainer.state.save_to_json(str(folder / "trainer_state.json"))

    place = Path(given.output_dir) / folder.name
    return {
        "output_dir": given.output_dir,
        "resume_from_checkpoint": str(place),
        "model_config": str(place),
        "model_overrides": {"vocab_size": model.config.vocab_size},
        "bias": not has_no_biases(model),
        **({"tokenizer_name": str(place)} if tokenizer is not None else {}),
        "block_size": model.config.n_positions,
        **settings,
        "ignore_data_skip": True,  # the order of its batches is not ours
        "report_to": "none",
    }


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
