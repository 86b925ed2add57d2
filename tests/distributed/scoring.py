"""What lm-eval does to a training on several processes, for worker.py."""

import json
import string
from pathlib import Path

import torch.distributed as dist
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mars_hf.evaluation import LMEvalCallback, evaluate
from mars_hf.evaluation.sources import ITEMS

TASKS = ["arc_easy", "hellaswag"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {character: index for index, character in enumerate(["?", *string.printable.replace("?", "")])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="~")


def add_callback(trainer, every: int) -> None:
    """Scores few items in batches of a size that leaves one process without work in the last round."""
    trainer.processing_class = tokenizer()
    callback = LMEvalCallback(trainer, TASKS, every=every, limit=3, data_dir=ITEMS, batch_size=7, strict=True)
    trainer.add_callback(callback)


def facts(trainer, folder: Path) -> dict:
    """The Trainer's log on every process, the files it wrote, and how calls fail that fail on one process alone."""
    model, own = trainer.model, tokenizer()
    distributed = dist.is_initialized()
    rank = dist.get_rank() if distributed else 0
    first = folder / "first"
    if rank == 0:
        (first / "sciq").mkdir(parents=True)
        row = {"question": "?", "support": "", "correct_answer": "a"}
        row |= {f"distractor{number}": "b" * number for number in (1, 2, 3)}
        (first / "sciq" / "test.jsonl").write_text(json.dumps(row) + "\n")
    else:
        first.mkdir(parents=True)

    def failure(**arguments) -> str:
        try:
            evaluate(model, tokenizer=own, distributed=True, **arguments)
        except ValueError as error:
            return str(error)
        return ""

    failures = {}
    if distributed:
        failures["items"] = failure(tasks=["sciq"], data_dir=first)
        failures["limit"] = failure(tasks=["arc_easy"], data_dir=ITEMS, limit=1 + rank)
    files = {path.name: json.loads(path.read_text()) for path in Path(trainer.args.output_dir).glob("lm_eval-*.json")}
    log = [row for row in trainer.state.log_history if "eval_hellaswag_acc_norm" in row]
    everyone = [{"log": log, "failures": failures, "files": files}]
    if distributed:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {"log": log, "failures": failures, "files": files})
    return {"ranks": everyone}
