"""Pretrains a GPT-2 with MARS, evaluates it, and leaves a checkpoint, a loss curve, a sample and scores.

    accelerate launch recipes/pretrain_gpt2.py
    accelerate launch recipes/pretrain_gpt2.py --dataset_path my_books/ --output_dir runs/books
    accelerate launch recipes/pretrain_gpt2.py --config recipes/configs/quickstart.yaml --optim mars_m
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/pretrain_gpt2.py
    python recipes/pretrain_gpt2.py --config recipes/configs/gpt2_xl/mars_adamw.yaml --dry_run --processes 8

Without --config the settings are those of recipes/configs/quickstart.yaml; every one of them can be overridden on the
command line, and --help lists them all.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pretraining_data import load_data, planned_vocabulary
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mars_hf import LMEvalCallback, MARSTrainer, MARSTrainingArguments
from mars_hf.data import causal_collator, count_bytes
from mars_hf.evaluation import format_table
from mars_hf.models import build_model, configure, make_lean
from mars_hf.plots import plot_loss
from mars_hf.training.callbacks import TrainingCost
from mars_hf.training.card import CardDetails
from mars_hf.training.checkpoints import checkpoint_to_resume, last_checkpoint
from mars_hf.training.config import parse_config
from mars_hf.training.cpu import keep_freed_memory
from mars_hf.training.dry_run import PlanArguments, apply_global_batch, describe_run
from mars_hf.training.engines import engine_name

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"


@dataclass
class DataArguments:
    dataset_name: str | None = field(
        default=None, metadata={"help": "Anything datasets.load_dataset takes. Default: the embedded corpus."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of dataset_name."})
    dataset_path: str | None = field(
        default=None,
        metadata={
            "help": "Local .txt, .md, .jsonl, .parquet or .csv, or .bin files of tokens (prepare_data.py, nanoGPT, "
            "fineweb_*): a file, a folder or a glob."
        },
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the documents."})
    validation_fraction: float = field(default=0.1, metadata={"help": "Share held out where no split is."})
    validation_split: str | None = field(default=None, metadata={"help": "Split to evaluate on."})
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer on the hub or in a folder, or: characters. Default: one trained on the corpus; for .bin "
            "files the one beside them, or none."
        },
    )
    vocab_size: int = field(
        default=2048,
        metadata={"help": "Tokens of the tokenizer trained on the corpus, or of .bin files without a tokenizer."},
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens of a training sequence."})
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Blocks of .bin files or of a stream to evaluate on. Default: all."}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read and tokenise while training; needs tokenizer_name and max_steps."}
    )
    validation_documents: int = field(
        default=1000, metadata={"help": "First documents of a stream, held out where it has no validation split."}
    )


@dataclass
class ModelArguments:
    model_size: str = field(default="small", metadata={"help": "GPT-2 of the paper: small, medium, large or xl."})
    model_config: str | None = field(
        default=None,
        metadata={
            "help": "Another architecture: a config.json, its folder or a hub name. Weights are fresh, and model_size, "
            "n_layer, n_head and n_embd do not apply."
        },
    )
    model_overrides: str | None = field(
        default=None, metadata={"help": 'Fields of model_config to set otherwise, {"num_hidden_layers": 2}.'}
    )
    n_layer: int | None = field(default=None, metadata={"help": "Layers, if not those of model_size."})
    n_head: int | None = field(default=None, metadata={"help": "Attention heads, if not those of model_size."})
    n_embd: int | None = field(default=None, metadata={"help": "Width, if not that of model_size."})
    cpu_threads: int | None = field(
        default=None, metadata={"help": "Threads of a process on CPU. Default: the cores, divided by the processes."}
    )
    bias: bool = field(default=False, metadata={"help": "Train the biases of a GPT-2; the paper's models have none."})


@dataclass
class EvaluationArguments:
    lm_eval_tasks: list[str] = field(
        default_factory=list, metadata={"help": "lm-eval tasks to score, as hellaswag,arc_easy, or none."}
    )
    lm_eval_every: str | None = field(
        default=None, metadata={"help": "Steps between two scorings, epoch or save; default: at the end alone."}
    )
    lm_eval_limit: int | None = field(default=None, metadata={"help": "Items of each task; default: all at hand."})
    lm_eval_data: str | None = field(default=None, metadata={"help": "Folder with <task>/<split>.jsonl."})
    lm_eval_strict: bool = field(default=False, metadata={"help": "A failed scoring ends the run."})
    sample_prompt: str = field(default="It is a truth", metadata={"help": "Start of the sampled text."})
    sample_tokens: int = field(default=100, metadata={"help": "Tokens to sample; 0 for none."})


ARGUMENTS = (DataArguments, ModelArguments, EvaluationArguments, PlanArguments, MARSTrainingArguments)


def main(options: Sequence[str] | None = None) -> None:
    """Runs the recipe with these command-line options; None: those of the process."""
    data_args, model_args, eval_args, plan, args = parse_config(
        ARGUMENTS, options, default_config=QUICKSTART, gives_way={"model_size": ("n_layer", "n_head", "n_embd")}
    )
    if args.label_smoothing_factor:
        # The Trainer also smooths the evaluation loss, and does not shift the labels of a compiled or FSDP2 model.
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor}: perplexity needs the plain loss, use 0"
        )
    apply_global_batch(args, plan)
    if plan.dry_run:
        with torch.device("meta"):
            config = configuration(planned_vocabulary(data_args), data_args.block_size, model_args)
            model = build_model(config, bias=model_args.bias)
        say(args, describe_run(model, args, plan, data_args.block_size))
        return
    if args.device.type == "cpu":
        # accelerate launch leaves one thread to each process, whatever the machine has.
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(model_args.cpu_threads or max(1, len(os.sched_getaffinity(0)) // local_processes))
        args.dataloader_pin_memory = False
        keep_freed_memory()
    resume = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir, args.max_steps)
    set_seed(args.seed)

    wanted = [task for task in eval_args.lm_eval_tasks if task != "none"]
    data = load_data(data_args, args, resume, needs_tokenizer=bool(wanted or eval_args.sample_tokens))
    tokenizer = data.tokenizer

    config = configuration(data.vocabulary, data_args.block_size, model_args)
    model = build_model(config, bias=model_args.bias)
    make_lean(model, compiled=args.torch_compile)
    cost = TrainingCost()
    trainer = MARSTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=causal_collator,
        processing_class=tokenizer,
        callbacks=[*data.callbacks, cost],
    )
    scores = add_scores(trainer, wanted, eval_args) if wanted else None
    tokens_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * data_args.block_size
    say(
        args,
        f"{config.model_type}, {trainer.model.num_parameters():,} parameters, vocabulary {config.vocab_size:,}, "
        f"{data.described}, {tokens_per_step:,} tokens a step, "
        f"{args.world_size} process(es), {engine_name()}",
    )
    chosen = {name: getattr(args, name) for name in ("optim", "mars_type", "learning_rate", "is_approx", "mars_fused")}
    say(args, ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None))

    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        last = last_checkpoint(args.output_dir)
        how = "add --resume_from_checkpoint true to the same command" if last else "start again, there is none yet"
        say(args, f"\nInterrupted. Last checkpoint: {last}. To resume: {how}.")
        sys.exit(130)

    predicted_bytes = count_bytes(data.validation, tokenizer) if tokenizer else None
    results = {**perplexity(trainer, predicted_bytes), "settings": chosen}
    results["settings"] |= {"steps": trainer.state.global_step, "tokens_per_step": tokens_per_step}
    results |= {"cost": cost.report(), "history": trainer.state.log_history}
    final = Path(args.output_dir) / "final"
    trainer.save_model(str(final))
    report = Path(args.output_dir) / "results.json"
    if args.should_save:
        report.write_text(json.dumps(results, indent=2))  # what is known, should a later part fail
    if not math.isfinite(results["eval_loss"]):
        raise ValueError(f"eval_loss={results['eval_loss']}: it diverged, lower learning_rate={args.learning_rate}")
    if scores:
        say(args, f"scoring {', '.join(scores.tasks)} ...")
        results["lm_eval"] = scores.result or scores.score()  # the last step may have been scored already
    if args.should_save:
        curve = plot_loss({args.optim: trainer.state.log_history}, Path(args.output_dir) / "loss.png")
        model = reload(final).to(args.device)
        if eval_args.sample_tokens:
            results["sample"] = sample(model, tokenizer, data_args.block_size, eval_args)
            say(args, f"\n{results['sample']}\n")
        if results.get("lm_eval"):
            say(args, format_table(results["lm_eval"]))
        report.write_text(json.dumps(results, indent=2))
        source = data_args.dataset_name or data_args.dataset_path or "the embedded corpus, two novels by Jane Austen"
        described = f"{source}: {data.described}, vocabulary {config.vocab_size:,}, blocks of {data_args.block_size}."
        trainer.card_details = CardDetails(described, results, curve)
        trainer.create_model_card()
        for file in ("README.md", curve.name):
            shutil.copy(Path(args.output_dir) / file, final)
        say(
            args,
            f"\nevaluation loss {results['eval_loss']:.4f} nats a token, perplexity {results['perplexity']:.2f}"
            + (f", {results['bits_per_byte']:.4f} bits per byte\n" if tokenizer else "\n")
            + f"model {final}, loss curve {curve}, all figures {report}",
        )
    if args.push_to_hub:
        trainer.push_to_hub()
    trainer.accelerator.wait_for_everyone()


def configuration(
    vocabulary: PreTrainedTokenizerBase | int, block_size: int, model_args: ModelArguments
) -> PreTrainedConfig:
    """The model's configuration."""
    fields = ("model_size", "model_config", "model_overrides", "n_layer", "n_head", "n_embd")
    return configure(vocabulary, block_size, **{name: getattr(model_args, name) for name in fields})


def say(args: MARSTrainingArguments, text: str) -> None:
    """Prints on one process."""
    if args.should_save:
        print(text, flush=True)


def perplexity(trainer: MARSTrainer, predicted_bytes: int | None) -> dict[str, Any]:
    """Loss, perplexity and, where the bytes are known, bits per byte of the validation blocks, all of equal length."""
    from mars_hf.evaluation import load_metric

    loss = trainer.evaluate()["eval_loss"]
    if not math.isfinite(loss):
        return {"eval_loss": loss}
    blocks = trainer.eval_dataset
    tokens = len(blocks) * (len(blocks[0]["input_ids"]) - 1)
    nll = {"negative_log_likelihoods": [loss * tokens]}
    scores = {"eval_loss": loss, **load_metric("perplexity").compute(**nll, tokens=[tokens])}
    if predicted_bytes is not None:
        scores |= load_metric("bits_per_byte").compute(**nll, bytes=[predicted_bytes])
    return scores


def reload(folder: Path) -> torch.nn.Module:
    """The saved model, whole on this process: the trained one may be in shards on all of them."""
    # Otherwise ZeRO-3 would have all processes load it together.
    unset_hf_deepspeed_config()
    return AutoModelForCausalLM.from_pretrained(folder)


def sample(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, context: int, eval_args: EvaluationArguments
) -> str:
    """A continuation of the prompt, that and the prompt at most `context` tokens long."""
    start = tokenizer(eval_args.sample_prompt)["input_ids"] or [tokenizer.eos_token_id]
    start = torch.tensor([start[-context // 2 :]], device=model.device)
    with torch.no_grad():
        ids = model.eval().generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=50,
            max_new_tokens=min(eval_args.sample_tokens, context - start.shape[1]),
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def add_scores(trainer: MARSTrainer, tasks: list[str], eval_args: EvaluationArguments) -> LMEvalCallback:
    """The callback that scores lm-eval tasks during training and, when asked, after it."""
    callback = LMEvalCallback(
        trainer,
        tasks,
        every=eval_args.lm_eval_every,
        limit=eval_args.lm_eval_limit,
        data_dir=eval_args.lm_eval_data,
        strict=eval_args.lm_eval_strict,
    )
    trainer.add_callback(callback)
    return callback


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        # An error in a data loader worker comes with its traceback.
        sys.exit(f"{Path(__file__).name}: {str(error).strip().splitlines()[-1].removeprefix('ValueError: ')}")
