"""Scores checkpoints on the nine downstream tasks of the MARS paper, beside the rows of the paper.

    python recipes/evaluate_downstream.py runs/quickstart/final --tasks arc_easy,hellaswag --limit 100
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/evaluate_downstream.py A B --output_dir scores

The items come from --lm_eval_data, the Hugging Face Hub, its cache or this package; the table says which.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from mars_hf.evaluation import evaluate
from mars_hf.evaluation.paper import PUBLISHED, TASKS, format_paper_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="A folder or a name on the Hub.")
    parser.add_argument("--tasks", default="paper", help='"paper" for all nine, or some of ' + ",".join(TASKS))
    parser.add_argument("--lm_eval_data", metavar="DIR", help="Folder with <task>/<split>.jsonl.")
    parser.add_argument("--limit", type=int, help="Items of each task, of each subject of mmlu; default: all.")
    parser.add_argument("--batch_size", default="auto", help="Sequences in a forward pass of a process, or auto.")
    parser.add_argument("--output_dir", default=".", help="Where downstream.md and downstream.json go.")
    args = parser.parse_args()

    tasks = list(TASKS) if args.tasks == "paper" else args.tasks.split(",")
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"tasks: {unknown[0]!r} is not in the paper's table; choose from {', '.join(TASKS)}")
    state = PartialState(cpu=not torch.cuda.is_available())  # joins the processes of a launch
    results = {}
    for checkpoint in dict.fromkeys(args.checkpoints):
        results[checkpoint] = evaluate(
            checkpoint,
            tasks=tasks,
            data_dir=args.lm_eval_data,
            limit=args.limit,
            batch_size=int(args.batch_size) if args.batch_size.isdigit() else args.batch_size,
            distributed=True,
        )
        if state.is_main_process:  # after each checkpoint, should a later one fail
            write(results, Path(args.output_dir))
    if state.is_main_process:
        print(format_paper_table(results))
    state.destroy_process_group()


def write(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "downstream.md").write_text(format_paper_table(results) + "\n")
    (folder / "downstream.json").write_text(json.dumps({"results": results, "published": PUBLISHED}, indent=2))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
