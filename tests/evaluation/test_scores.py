"""The scores themselves: against a computation by hand, against lm-eval's own entry point, and against themselves."""

import json
import re
import shutil

import lm_eval.evaluator
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mars_hf.evaluation import evaluate
from mars_hf.evaluation.ranks import Ranks
from mars_hf.evaluation.scorer import Scorer
from mars_hf.evaluation.tasks import _stock_files

LIMIT = 12


def hellaswag_by_hand(item):
    def clean(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    prompt = clean(f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}")
    return prompt, [clean(ending) for ending in item["endings"]], int(item["label"])


def arc_by_hand(item):
    answers = item["choices"]
    return f"Question: {item['question']}\nAnswer:", answers["text"], answers["label"].index(item["answerKey"])


BY_HAND = {"hellaswag": hellaswag_by_hand, "arc_easy": arc_by_hand, "arc_challenge": arc_by_hand}


@torch.no_grad()
def log_likelihood(model, prompt, continuation):
    """log p(continuation | prompt) of token lists, the prompt cut on the left to what the model takes."""
    ids = (prompt + continuation)[-(model.config.n_positions + 1) :]
    logprobs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return sum(logprobs[position, ids[position]].item() for position in range(-len(continuation), 0))


@pytest.mark.parametrize("n_positions", [128, 512])
def test_scores_equal_hand_computation(make_model, tokenizer, items, items_dir, n_positions):
    model = make_model(n_positions)
    result = evaluate(model, tasks=list(BY_HAND), tokenizer=tokenizer, data_dir=items_dir, limit=LIMIT)
    assert (result["truncated_requests"] > 0) == (n_positions == 128), "the short model must cut prompts, the long none"
    model.eval()
    for task, by_hand in BY_HAND.items():
        correct = correct_by_length = 0
        for item in items(task)[:LIMIT]:
            prompt, choices, gold = by_hand(item)
            prompt_ids = tokenizer(prompt).input_ids
            scores = [
                log_likelihood(model, prompt_ids, tokenizer(f"{prompt} {choice}").input_ids[len(prompt_ids) :])
                for choice in choices
            ]
            per_character = [score / len(choice) for score, choice in zip(scores, choices)]
            correct += scores.index(max(scores)) == gold
            correct_by_length += per_character.index(max(per_character)) == gold
        assert result["tasks"][task]["acc"] == pytest.approx(correct / LIMIT), f"acc of {task}"
        assert result["tasks"][task]["acc_norm"] == pytest.approx(correct_by_length / LIMIT), f"acc_norm of {task}"


def test_log_likelihoods_and_pieces_equal_hand_computation(make_model, tokenizer):
    model = make_model(32)
    scorer = Scorer(model, tokenizer, batch_size=3, ranks=Ranks(together=False))
    short, long = list(range(10, 20)), list(range(40, 110))  # 70 tokens do not fit 32 positions: pieces of 16
    requests = [((None, None), list(range(1, 9)), short), ((None, None), list(range(1, 60)), long)]
    (short_score, _), (long_score, _) = scorer._loglikelihood_tokens(requests)
    assert short_score == pytest.approx(log_likelihood(model, requests[0][1], short), rel=1e-5)
    by_hand = sum(log_likelihood(model, requests[1][1] + long[:at], long[at : at + 16]) for at in range(0, 70, 16))
    assert long_score == pytest.approx(by_hand, rel=1e-5), "a continuation in pieces"
    assert scorer.truncated == 1


def test_a_model_of_few_positions_is_scored(make_model, tokenizer, items_dir):
    result = evaluate(make_model(16), tasks=["hellaswag"], tokenizer=tokenizer, data_dir=items_dir, limit=2)
    assert result["tasks"]["hellaswag"]["items"] == 2 and result["truncated_requests"] == 8


@pytest.mark.parametrize(("task", "shots"), [("hellaswag", 0), ("arc_challenge", 0), ("arc_easy", 2), ("hellaswag", 1)])
def test_result_equals_simple_evaluate(make_model, tokenizer, items, tmp_path, monkeypatch, task, shots):
    split = "validation" if task == "hellaswag" else "test"
    folder = tmp_path / task
    folder.mkdir()
    for name, rows in {split: items(task)[:20], "train": items(task)[20:60]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The other route: a YAML that includes the stock one, read through the json builder of datasets.
    splits = {"training": "train" if shots else "null", "validation": "null", "test": "null"} | {split[:10]: split}
    files = {name: str(folder / f"{name}.jsonl") for name in (split, "train")}
    (folder / "task.yaml").write_text(
        f"include: {_stock_files()[task]}\ntask: {task}\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {json.dumps({'data_files': files})}\n"
        + "".join(f"{name}_split: {value}\n" for name, value in splits.items())
    )
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # seconds of pip in a subprocess
    model = make_model(512)
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8),
        tasks=[task],
        limit=LIMIT,
        num_fewshot=shots,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=False,
    )
    ours = evaluate(model, tasks=[task], tokenizer=tokenizer, data_dir=tmp_path, limit=LIMIT, num_fewshot=shots)[
        "tasks"
    ][task]
    expected = {key.removesuffix(",none"): value for key, value in theirs["results"][task].items() if "," in key}
    assert set(expected) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert {key: ours[key] for key in expected} == expected
    assert (ours["version"], ours["num_fewshot"]) == (theirs["versions"][task], theirs["n-shot"][task])
    assert ours["num_fewshot"] == shots


def test_scores_depend_neither_on_the_batch_size_nor_on_a_pad_token(model, tokenizer, items_dir):
    def score(size):
        arguments = {"tokenizer": tokenizer, "data_dir": items_dir, "limit": 40, "batch_size": size}
        return evaluate(model, tasks=["arc_easy", "boolq"], **arguments)["tasks"]

    one, *others = (score(size) for size in (1, 8, "auto"))
    tokenizer.pad_token = tokenizer.eos_token
    for what, other in zip(["8", "auto", "8 with a pad token"], [*others, score(8)]):
        assert other == one, f"batch size {what}"
    assert 0 < one["arc_easy"]["acc"] < 1


def test_auto_fills_forward_passes_with_tokens(model, tokenizer, items_dir):
    shapes = []
    model.register_forward_pre_hook(lambda module, arguments: shapes.append(tuple(arguments[0].shape)))
    arguments = {"tokenizer": tokenizer, "data_dir": items_dir, "limit": 60}
    evaluate(model, tasks=["hellaswag"], batch_size="auto", **arguments)
    assert sum(rows for rows, _ in shapes) == 240, "a sequence for each ending"
    assert all(rows * length <= 4096 and rows <= 64 for rows, length in shapes), shapes
    assert shapes[0] == (32, 128) and [length for _, length in shapes] == sorted((s[1] for s in shapes), reverse=True)


def test_no_logits_are_computed_for_the_prompts(model, tokenizer, items_dir):
    shapes = []
    model.lm_head.register_forward_hook(lambda module, arguments, logits: shapes.append(logits.shape[1]))
    evaluate(model, tasks=["boolq"], tokenizer=tokenizer, data_dir=items_dir, limit=1)
    assert max(shapes) < 8, f"prompts of 128 tokens, and logits of {shapes} positions"


def test_mmlu_is_the_average_of_its_subjects_over_all_items(model, tokenizer, items_dir, tmp_path):
    shutil.copytree(items_dir / "mmlu", tmp_path / "mmlu")
    anatomy = tmp_path / "mmlu" / "anatomy" / "test.jsonl"
    anatomy.write_text(anatomy.read_text() * 10)  # 20 items, so that an average over subjects is another number
    result = evaluate(model, tasks="mmlu,mmlu_anatomy", tokenizer=tokenizer, data_dir=tmp_path)["tasks"]
    subjects = [f"mmlu_{folder.name}" for folder in (tmp_path / "mmlu").iterdir()]
    assert (len(subjects), result["mmlu"]["items"]) == (57, 56 * 2 + 20)
    alone = evaluate(model, tasks=subjects, tokenizer=tokenizer, data_dir=tmp_path)["tasks"]
    correct = sum(task["acc"] * task["items"] for task in alone.values())
    assert result["mmlu"]["acc"] == pytest.approx(correct / 132), "correct items over items"
    assert result["mmlu_anatomy"] == alone["mmlu_anatomy"], "a subject named beside its group"
    assert result["mmlu"]["data"] == "data_dir: 132 test items (of 14,042) in 57 parts"


def test_a_checkpoint_scores_as_the_model_in_memory(model, tokenizer, items_dir, tmp_path, no_network):
    model.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    arguments = {"tasks": ["arc_easy", "hellaswag"], "data_dir": items_dir, "limit": LIMIT}
    in_memory = evaluate(model, tokenizer=tokenizer, **arguments)
    for path in (tmp_path / "checkpoint", str(tmp_path / "checkpoint")):
        assert evaluate(path, **arguments)["tasks"] == in_memory["tasks"]
    assert no_network == []


@pytest.mark.parametrize(
    "wrap", [torch.compile, torch.nn.DataParallel, lambda m: torch.nn.DataParallel(torch.compile(m))]
)
def test_a_wrapped_model_scores_as_the_bare_one(model, tokenizer, items_dir, wrap):
    arguments = {"tasks": ["arc_easy"], "tokenizer": tokenizer, "data_dir": items_dir, "limit": 4}
    assert evaluate(wrap(model), **arguments) == evaluate(model, **arguments)
