"""An evaluation leaves no trace in the model, its training, the random states, the tokenizer and the terminal."""

import json
import random
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
import transformers

from mars_hf.evaluation import evaluate


def run(model, tokenizer, items_dir, **arguments):
    return evaluate(model, tasks=["hellaswag"], tokenizer=tokenizer, data_dir=items_dir, **{"limit": 3, **arguments})


def draw_random_numbers(*_):
    """A forward hook, for a model that is random in eval mode as well."""
    random.random()
    np.random.rand()
    torch.rand(1)


def test_mode_config_random_states_and_tokenizer_are_unchanged(model, tokenizer, items_dir):
    model.transformer.h[0].eval()  # held in eval mode by the user
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)  # untied, though not in the config
    model.register_forward_hook(draw_random_numbers)
    modes = {name: module.training for name, module in model.named_modules()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    vocabulary = (tokenizer.pad_token, len(tokenizer), dict(tokenizer.special_tokens_map))
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    run(model, tokenizer, items_dir)

    assert {name: module.training for name, module in model.named_modules()} == modes
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert (tokenizer.pad_token, len(tokenizer), dict(tokenizer.special_tokens_map)) == vocabulary
    assert vocabulary[0] is None, "the tokenizer of this test must lack a pad token"
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1][1].tolist()
    torch.testing.assert_close(torch.get_rng_state(), states[2], rtol=0, atol=0)


def test_the_mode_is_restored_after_an_error(model, tokenizer, items_dir):
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="model: 12 of 12 log-likelihoods are NaN"):
        run(model, tokenizer, items_dir)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("shots", [0, 1])
def test_training_goes_on_as_without_evaluation(make_model, tokenizer, items_dir, items, tmp_path, shots):
    (tmp_path / "hellaswag").mkdir()
    for split in ("validation", "train"):
        (tmp_path / "hellaswag" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in items("hellaswag")[:5])
        )

    def train(with_evaluation):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        losses = []
        for step in range(4):
            batch = torch.randint(model.config.vocab_size, (2, 16))
            loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if with_evaluation and step == 1:
                run(model, tokenizer, tmp_path, num_fewshot=shots)
        return losses, model.state_dict()

    (losses, weights), (evaluated_losses, evaluated_weights) = train(False), train(True)
    assert losses == evaluated_losses
    torch.testing.assert_close(dict(weights), dict(evaluated_weights), rtol=0, atol=0)


def test_nothing_is_printed_and_switches_are_put_back(model, tokenizer, items_dir, capfd, caplog):
    assert not datasets.are_progress_bars_disabled()
    verbosity = transformers.utils.logging.get_verbosity()
    run(model, tokenizer, items_dir)
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == []
    assert not datasets.are_progress_bars_disabled()
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_a_data_dir_needs_no_network(model, tokenizer, items_dir, no_network):
    run(model, tokenizer, items_dir)
    assert no_network == []


def test_embedded_items_cost_one_request_a_process(model, tokenizer, no_network):
    first = run(model, tokenizer, None)
    attempts = len(no_network)
    assert attempts >= 1 and first["tasks"]["hellaswag"]["source"] == "embedded"
    assert run(model, tokenizer, None) == first
    assert len(no_network) == attempts, "the answer of the Hub is remembered"


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_the_offline_variables_spare_that_request(model, tokenizer, no_network, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert run(model, tokenizer, None)["tasks"]["hellaswag"]["source"] == "embedded"
    assert no_network == []


def test_nothing_is_written_to_the_working_directory(model, tokenizer, items_dir, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    run(model, tokenizer, items_dir)
    assert list((tmp_path / "empty").iterdir()) == []


def test_importing_the_package_is_light():
    code = (
        "import sys; from mars_hf.evaluation import evaluate, format_table, load_metric; "
        "print(sorted({'lm_eval', 'evaluate', 'datasets', 'transformers', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
