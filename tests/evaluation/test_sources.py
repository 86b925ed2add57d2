"""Which items are scored, and what the result calls them."""

import hashlib
import json
import shutil
import threading
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from datasets.arrow_writer import ArrowWriter

from mars_hf import hub
from mars_hf.evaluation import evaluate, format_table, sources
from mars_hf.evaluation.sources import Items


def test_the_manifest_describes_the_embedded_items(items_dir):
    licence = (items_dir / "LICENSE").read_text()
    for task, entry in json.loads((items_dir / "manifest.json").read_text()).items():
        content = (items_dir / task / f"{entry['split']}.jsonl").read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], task
        assert content.count(b"\n") == entry["items"] < entry["items_in_split"]
        known = (
            ("mmlu/<subject>/test.jsonl", "14,042")
            if task.startswith("mmlu/")
            else (task, f"{entry['items_in_split']:,}")
        )
        assert all(words in licence for words in known), f"LICENSE does not name {known}"


def write(path, content):
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in content))


def rows(count):
    return datasets.Dataset.from_dict({"question": ["?"] * count})


@pytest.mark.parametrize(
    ("source", "at_hand", "total", "scored", "text"),
    [
        ("embedded", 300, 10042, 300, "embedded subset: first 300 of 10,042 test items"),
        ("embedded", 300, 10042, 12, "embedded subset: first 12 of 10,042 test items"),
        ("hub", 2376, 2376, 2376, "hub: all 2,376 test items"),
        ("cache", 2376, 2376, 100, "cache subset: first 100 of 2,376 test items"),
        ("data_dir", 500, 500, 500, "data_dir: all 500 test items"),
        ("data_dir", 500, 500, 50, "data_dir subset: first 50 of 500 test items"),
        ("data_dir", 70, 500, 70, "data_dir subset: 70 of 500 test items"),
        ("data_dir", 70, None, 70, "data_dir: all 70 test items (size of the full split unknown)"),
        ("data_dir", 70, None, 7, "data_dir: first 7 of 70 test items (size of the full split unknown)"),
    ],
)
def test_labels(source, at_hand, total, scored, text):
    assert Items(source, {"test": rows(at_hand)}, "test", "test", total).describe(scored) == text


def test_a_result_names_its_items(model, tokenizer):
    result = evaluate(model, tasks=["arc_easy", "hellaswag"], tokenizer=tokenizer, limit=2)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    expected = {"items": 2, "total_items": 2376, "subset": True, "source": "embedded", "split": "test"}
    expected |= {"data": "embedded subset: first 2 of 2,376 test items", "version": 1.0, "num_fewshot": 0}
    task = result["tasks"]["arc_easy"]
    assert {key: task[key] for key in expected} == expected
    assert set(task) - set(expected) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    table = format_table(result).split("\n")
    assert len(table) == 2 + 4 and len({len(line) for line in table}) == 1
    assert table[2].split() == (
        f"| arc_easy | acc | {task['acc']:.4f} ± {task['acc_stderr']:.4f} | 2 | {task['data']} |".split()
    )


def test_without_limit_every_item_at_hand_is_scored(model, tokenizer, tmp_path):
    write(
        tmp_path / "piqa" / "validation.jsonl", [{"goal": "Cut", "sol1": "a knife", "sol2": "a spoon", "label": 0}] * 7
    )
    task = evaluate(model, tasks="piqa", tokenizer=tokenizer, data_dir=tmp_path)["tasks"]["piqa"]
    assert (task["items"], task["total_items"], task["subset"]) == (7, 1838, True)
    assert task["data"] == "data_dir subset: 7 of 1,838 validation items"


def test_another_split_than_the_stock_one_is_named(model, tokenizer, items, tmp_path):
    write(tmp_path / "arc_easy" / "validation.jsonl", items("arc_easy")[:3])
    task = evaluate(model, tasks=["arc_easy"], tokenizer=tokenizer, data_dir=tmp_path)["tasks"]["arc_easy"]
    assert task["split"] == "validation"
    assert task["data"] == "data_dir subset: 3 of 570 validation items; the stock task scores test"


def test_a_task_the_folder_lacks_comes_from_the_next_source(model, tokenizer, items, tmp_path):
    write(tmp_path / "arc_easy" / "test.jsonl", items("arc_easy")[:3])
    result = evaluate(model, tasks=["arc_easy", "hellaswag"], tokenizer=tokenizer, data_dir=tmp_path, limit=2)
    assert [task["source"] for task in result["tasks"].values()] == ["data_dir", "embedded"]


def test_the_hub_comes_before_the_embedded_items(model, tokenizer, items_dir, tmp_path, monkeypatch):
    # datasets takes a folder of this name for the dataset, which stands in for the Hub here.
    (tmp_path / "Rowan" / "hellaswag").mkdir(parents=True)
    shutil.copy(items_dir / "hellaswag" / "validation.jsonl", tmp_path / "Rowan" / "hellaswag")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "hub_reachable", lambda: True)
    result = evaluate(model, tasks=["hellaswag"], tokenizer=tokenizer, limit=2)
    assert result["tasks"]["hellaswag"]["data"] == "hub subset: first 2 of 300 validation items"


def test_the_datasets_cache_comes_before_the_embedded_items(model, tokenizer, items, tmp_path, no_network):
    found = datasets.Dataset.from_list(items("hellaswag")[:9])
    folder = tmp_path / "datasets_cache" / "Rowan___hellaswag" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    with ArrowWriter(path=str(folder / "hellaswag-validation.arrow"), features=found.features) as writer:
        for row in found:
            writer.write(row)
        writer.finalize()
    split = datasets.SplitInfo("validation", num_examples=9, dataset_name="hellaswag")
    info = datasets.DatasetInfo(features=found.features, config_name="default", version="0.0.0")
    info.builder_name, info.dataset_name = "json", "hellaswag"
    info.splits = datasets.SplitDict({"validation": split}, dataset_name="hellaswag")
    info.write_to_directory(str(folder))
    task = evaluate(model, tasks=["hellaswag"], tokenizer=tokenizer)["tasks"]["hellaswag"]
    assert (task["source"], task["items"], task["subset"]) == ("cache", 9, False)
    assert all("huggingface" in str(attempt) for attempt in no_network) and len(no_network) <= 2


@pytest.mark.parametrize(("status", "reachable"), [(200, True), (307, True), (503, False), ("silence", False)])
def test_the_hub_is_asked_once_and_not_for_long(monkeypatch, status, reachable):
    questions = []

    class Session:
        def head(self, url, timeout):
            questions.append(url)
            if status == "silence":
                threading.Event().wait(30)  # as a look-up of the host name may
            return SimpleNamespace(status_code=status)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    assert hub.hub_reachable() is reachable and hub.hub_reachable() is reachable
    assert len(questions) == 1
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert hub.hub_reachable() is False
