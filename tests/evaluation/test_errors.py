"""What a user may get wrong: one line that names the argument, the value seen and the way out."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, GPT2Model, T5Config
from transformers import T5ForConditionalGeneration as T5

from mars_hf.evaluation import evaluate, load_metric, tasks

TINY = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}


def failure(error, *arguments, **keywords):
    with pytest.raises(error) as caught:
        evaluate(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"limit": 0}, ["limit: 0", "at least 1", "None"]),
        ({"limit": 0.5}, ["limit: 0.5", "at least 1"]),
        ({"limit": True}, ["limit: True"]),
        ({"batch_size": 0}, ["batch_size: 0", "at least 1", '"auto"']),
        ({"batch_size": None}, ["batch_size: None", "at least 1"]),
        ({"num_fewshot": -1}, ["num_fewshot: -1", "at least 0"]),
        ({"num_fewshot": 2}, ["num_fewshot", "'arc_easy'", "'train'", "num_fewshot=0", "arc_easy/train.jsonl"]),
        ({"tasks": []}, ["tasks: []", "hellaswag"]),
        ({"tasks": [3]}, ["tasks: [3]", "hellaswag"]),
        ({"tasks": " ,"}, ["tasks: ' ,'", "hellaswag"]),
        ({"tasks": ["hellaswgg"]}, ["tasks: 'hellaswgg'", "did you mean 'hellaswag'?"]),
        (
            {"tasks": ["arc_easy", "sciq"]},
            ["'sciq'", "'allenai/sciq'", "go online", "data_dir= (--lm_eval_data) with sciq/test.jsonl"],
        ),
        ({"tasks": ["glue"]}, ["tasks: 'glue'", "one by one"]),
        ({"data_dir": "no/such/folder"}, ["data_dir: 'no/such/folder'", "<task>/<split>.jsonl"]),
        ({"tokenizer": None}, ["tokenizer: None", "pass tokenizer="]),
        ({"tokenizer": "gpt2"}, ["tokenizer: str", "PreTrainedTokenizerFast"]),
    ],
)
def test_arguments(model, tokenizer, arguments, parts):
    message = failure(ValueError, model, **{"tasks": ["arc_easy"], "tokenizer": tokenizer, "limit": 2, **arguments})
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2),
        lambda: GPT2Model(GPT2Config(vocab_size=16, **TINY)),
        lambda: T5(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)),
        lambda: BertForMaskedLM(
            BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        ),
    ],
)
def test_models_without_causal_head(tokenizer, make):
    model = make()
    message = failure(ValueError, model, tasks=["arc_easy"], tokenizer=tokenizer)
    assert message.startswith(f"model_or_path: {type(model).__name__} is no ")


def test_a_tokenizer_that_does_not_fit_the_model(tokenizer):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, **TINY))
    message = failure(ValueError, model, tasks=["arc_easy"], tokenizer=tokenizer, limit=1)
    assert "outside the model's vocabulary of 16" in message


def test_paths(model, tmp_path, no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "model_or_path" in failure(ValueError, tmp_path, tasks=["arc_easy"])
    assert "'nobody/nothing'" in failure(ValueError, "nobody/nothing", tasks=["arc_easy"])
    model.save_pretrained(tmp_path)
    assert failure(ValueError, tmp_path, tasks=["arc_easy"]).startswith("tokenizer: no tokenizer")
    # huggingface_hub looks up by itself which program it serves, once a process; a search of the Hub would be more.
    assert len(no_network) <= 1


def test_a_checkpoint_whose_weights_are_not_the_models(model, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    whole = file.read_bytes()
    for names, part in (
        ({name: f"_orig_mod.{name}" for name in weights}, "lacks 29 weights"),
        ({name: name for name in weights if name != "transformer.h.1.mlp.c_fc.weight"}, "lacks 1 weights, such as 't"),
    ):
        save_file({new: weights[old] for old, new in names.items()}, file, metadata={"format": "pt"})
        message = failure(ValueError, tmp_path, tasks=["arc_easy"], limit=1)
        assert message.startswith("model_or_path: ") and part in message, message
    file.write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded (SafetensorError" in failure(ValueError, tmp_path, tasks=["arc_easy"], limit=1)


@pytest.mark.parametrize(
    ("content", "part"),
    [("", "holds no items"), ("{'a': 1}\n", "is not JSON lines"), ("1\n2\n", "not a JSON object")],
)
def test_a_file_that_is_not_json_lines(model, tokenizer, tmp_path, content, part):
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "test.jsonl").write_text(content)
    assert part in failure(ValueError, model, tasks=["arc_easy"], tokenizer=tokenizer, data_dir=tmp_path)


def test_a_later_row_that_does_not_fit(model, tokenizer, items, tmp_path):
    (tmp_path / "arc_easy").mkdir()
    first, second = items("arc_easy")[:2]
    del second["choices"]
    (tmp_path / "arc_easy" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    message = failure(ValueError, model, tasks=["arc_easy"], tokenizer=tokenizer, data_dir=tmp_path)
    assert message.startswith("tasks: the data_dir rows of 'arc_easy' do not fit its prompt"), message


def test_a_generation_task_that_leaves_no_room_for_the_prompt(model, tokenizer, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    message = failure(ValueError, model, tasks=["gsm8k"], tokenizer=tokenizer, data_dir=tmp_path)
    assert message.startswith("tasks: 'gsm8k' generates text") and "(128)" in message, message


def test_a_task_whose_code_fails(model, tokenizer, monkeypatch):
    def fails(path):
        raise ModuleNotFoundError("No module named\n'math_verify'")

    monkeypatch.setattr(tasks, "load_yaml", fails)
    message = failure(ValueError, model, tasks=["arc_easy"], tokenizer=tokenizer)
    assert message.startswith("tasks: the definition of 'arc_easy' cannot be loaded (ModuleNotFoundError"), message


def test_rows_of_another_schema(model, tokenizer, tmp_path):
    for task, split in {"arc_easy": "test", "hellaswag": "validation"}.items():
        (tmp_path / task).mkdir()
        (tmp_path / task / f"{split}.jsonl").write_text('{"sentence": "?"}\n')
        message = failure(ValueError, model, tasks=[task], tokenizer=tokenizer, data_dir=tmp_path)
        assert message.startswith(f"tasks: the data_dir rows of {task!r} do not fit its prompt")


def test_a_missing_library(model, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert 'pip install "mars-hf[eval]"' in failure(ImportError, model, tasks=["arc_easy"], tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ImportError, match=r"pip install \"mars-hf\[eval\]\""):
        load_metric("perplexity")
