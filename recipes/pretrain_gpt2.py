"""Pretrains a GPT-2 with MARS, evaluates it, and leaves a checkpoint, a loss curve, a sample and scores.

    accelerate launch recipes/pretrain_gpt2.py
    accelerate launch recipes/pretrain_gpt2.py --dataset_path my_books/ --output_dir runs/books
    accelerate launch recipes/pretrain_gpt2.py --config recipes/configs/quickstart.yaml --optim mars_m
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/pretrain_gpt2.py

Without --config the settings are those of recipes/configs/quickstart.yaml; every one of them can be overridden on the
command line, and --help lists them all.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mars_hf import LMEvalCallback, MARSTrainer, MARSTrainingArguments
from mars_hf.data import causal_collator, count_bytes, load_text_corpus, pack, train_tokenizer
from mars_hf.evaluation import format_table
from mars_hf.models import build_gpt2, gpt2_config
from mars_hf.plots import plot_loss
from mars_hf.training.checkpoints import checkpoint_to_resume, last_checkpoint
from mars_hf.training.config import parse_config
from mars_hf.training.engines import engine_name

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"


@dataclass
class DataArguments:
    dataset_name: str | None = field(
        default=None, metadata={"help": "Anything datasets.load_dataset takes. Default: the embedded corpus."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of dataset_name."})
    dataset_path: str | None = field(
        default=None, metadata={"help": "Local .txt, .md, .jsonl, .parquet or .csv: a file, a folder or a glob."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the documents."})
    validation_fraction: float = field(default=0.1, metadata={"help": "Share held out where no split is."})
    validation_split: str | None = field(default=None, metadata={"help": "Split to evaluate on."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer on the hub or in a folder. Default: one trained on the corpus."}
    )
    vocab_size: int = field(default=2048, metadata={"help": "Tokens of the tokenizer trained on the corpus."})
    block_size: int = field(default=1024, metadata={"help": "Tokens of a training sequence."})


@dataclass
class ModelArguments:
    model_size: str = field(default="small", metadata={"help": "GPT-2 of the paper: small, medium, large or xl."})
    n_layer: int | None = field(default=None, metadata={"help": "Layers, if not those of model_size."})
    n_head: int | None = field(default=None, metadata={"help": "Attention heads, if not those of model_size."})
    n_embd: int | None = field(default=None, metadata={"help": "Width, if not that of model_size."})
    cpu_threads: int | None = field(
        default=None, metadata={"help": "Threads of a process on CPU. Default: the cores, divided by the processes."}
    )
    bias: bool = field(default=False, metadata={"help": "Train biases; the paper's models have none."})


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


def main() -> None:
    data_args, model_args, eval_args, args = parse_config(
        [DataArguments, ModelArguments, EvaluationArguments, MARSTrainingArguments], default_config=QUICKSTART
    )
    if args.device.type == "cpu":
        # accelerate launch leaves one thread to each process, whatever the machine has.
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(model_args.cpu_threads or max(1, len(os.sched_getaffinity(0)) // local_processes))
        args.dataloader_pin_memory = False
    resume = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir, args.max_steps)
    set_seed(args.seed)

    with args.main_process_first(desc="preparing the corpus"):
        corpus = load_text_corpus(
            dataset_name=data_args.dataset_name,
            dataset_config=data_args.dataset_config,
            dataset_path=data_args.dataset_path,
            text_column=data_args.text_column,
            validation_fraction=data_args.validation_fraction,
            validation_split=data_args.validation_split,
            seed=args.seed,
        )
        if data_args.tokenizer_name:
            tokenizer = AutoTokenizer.from_pretrained(data_args.tokenizer_name)
        else:
            tokenizer = train_tokenizer(corpus["train"]["text"], data_args.vocab_size)
        blocks = pack(corpus, tokenizer, data_args.block_size)

    sizes = {name: getattr(model_args, name) for name in ("n_layer", "n_head", "n_embd")}
    config = gpt2_config(
        model_args.model_size,
        vocab_size=len(tokenizer),
        n_positions=data_args.block_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{name: size for name, size in sizes.items() if size is not None},
    )
    trainer = MARSTrainer(
        model=build_gpt2(config, bias=model_args.bias),
        args=args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        data_collator=causal_collator,
        processing_class=tokenizer,
    )
    scores = add_scores(trainer, eval_args)
    tokens_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * data_args.block_size
    say(
        args,
        f"{trainer.model.num_parameters():,} parameters, vocabulary {len(tokenizer):,}, "
        f"{len(blocks['train']) * data_args.block_size:,} training tokens, {tokens_per_step:,} tokens a step, "
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

    results = {**perplexity(trainer, count_bytes(blocks["validation"], tokenizer)), "settings": chosen}
    results["settings"]["steps"] = trainer.state.global_step
    final = Path(args.output_dir) / "final"
    trainer.save_model(str(final))
    report = Path(args.output_dir) / "results.json"
    if args.should_save:
        report.write_text(json.dumps(results, indent=2))  # what is known, should a later part fail
    if scores:
        say(args, f"scoring {', '.join(scores.tasks)} ...")
        results["lm_eval"] = scores.score()
    if args.should_save:
        curve = plot_loss({args.optim: trainer.state.log_history}, Path(args.output_dir) / "loss.png")
        model = reload(final).to(args.device)
        if eval_args.sample_tokens:
            results["sample"] = sample(model, tokenizer, eval_args.sample_prompt, eval_args.sample_tokens)
            say(args, f"\n{results['sample']}\n")
        if results.get("lm_eval"):
            say(args, format_table(results["lm_eval"]))
        report.write_text(json.dumps(results, indent=2))
        say(
            args,
            f"\nevaluation loss {results['eval_loss']:.4f} nats a token, perplexity {results['perplexity']:.2f}, "
            f"{results['bits_per_byte']:.4f} bits per byte\n"
            f"model {final}, loss curve {curve}, all figures {report}",
        )
    trainer.accelerator.wait_for_everyone()


def say(args: MARSTrainingArguments, text: str) -> None:
    """Prints on one process."""
    if args.should_save:
        print(text, flush=True)


def perplexity(trainer: MARSTrainer, predicted_bytes: int) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of the validation blocks, all of equal length."""
    from mars_hf.evaluation import load_metric

    loss = trainer.evaluate()["eval_loss"]
    blocks = trainer.eval_dataset
    tokens = len(blocks) * (len(blocks[0]["input_ids"]) - 1)
    nll = {"negative_log_likelihoods": [loss * tokens]}
    return {
        "eval_loss": loss,
        **load_metric("perplexity").compute(**nll, tokens=[tokens]),
        **load_metric("bits_per_byte").compute(**nll, bytes=[predicted_bytes]),
    }


def reload(folder: Path) -> torch.nn.Module:
    """The saved model, whole on this process: the trained one may be in shards on all of them."""
    # Otherwise ZeRO-3 would have all processes load it together.
    unset_hf_deepspeed_config()
    return AutoModelForCausalLM.from_pretrained(folder)


def sample(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int) -> str:
    """A continuation of the prompt."""
    context = model.config.n_positions
    start = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    start = torch.tensor([start[-context // 2 :]], device=model.device)
    with torch.no_grad():
        ids = model.eval().generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=50,
            max_new_tokens=min(tokens, context - start.shape[1]),
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def add_scores(trainer: MARSTrainer, eval_args: EvaluationArguments) -> LMEvalCallback | None:
    """The callback that scores lm-eval tasks during training and, when asked, after it."""
    if eval_args.lm_eval_tasks in ([], ["none"]):
        return None
    callback = LMEvalCallback(
        trainer,
        eval_args.lm_eval_tasks,
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
        sys.exit(f"{Path(__file__).name}: {error}")
