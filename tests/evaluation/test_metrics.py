"""The metric modules, loaded both ways and checked by hand."""

import math
import re
from pathlib import Path

import evaluate
import pytest

import mars_hf.evaluation
from mars_hf.evaluation import load_metric

FOLDER = Path(mars_hf.evaluation.__file__).parent / "metrics"
COUNT = {"perplexity": "tokens", "bits_per_byte": "bytes"}


def from_file(name):
    return evaluate.load(str(FOLDER / f"{name}.py"))


@pytest.fixture(autouse=True, scope="module")
def caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_METRICS_CACHE", "HF_MODULES_CACHE"):
            patch.setattr(evaluate.config, name, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.mark.parametrize("load", [load_metric, from_file])
@pytest.mark.parametrize(
    ("name", "expected"), [("perplexity", math.exp(30.0 / 15)), ("bits_per_byte", 30.0 / 15 / math.log(2.0))]
)
def test_values(load, name, expected, no_network, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    sums = {"negative_log_likelihoods": [20.0, 10.0], COUNT[name]: [5, 10]}
    assert load(name).compute(**sums) == {name: pytest.approx(expected, rel=1e-15)}
    metric = load(name)
    for nll, count in zip(*sums.values()):
        metric.add_batch(**{"negative_log_likelihoods": [nll], COUNT[name]: [count]})
    assert metric.compute() == {name: pytest.approx(expected, rel=1e-15)}
    assert no_network == [] and list((tmp_path / "here").iterdir()) == []


def test_uniform_predictions_are_worth_the_size_of_the_alphabet():
    nll = 1000 * math.log(256)
    assert load_metric("perplexity").compute(negative_log_likelihoods=[nll], tokens=[1000])["perplexity"] == (
        pytest.approx(256)
    )
    assert load_metric("bits_per_byte").compute(negative_log_likelihoods=[nll], bytes=[1000])["bits_per_byte"] == (
        pytest.approx(8)
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("perplexity", math.exp(1 / 3)), ("bits_per_byte", 1 / 3 / math.log(2))]
)
def test_sums_lose_no_digits(name, expected):
    nlls = [1e17, 1.0, -1e17]  # 1; added up in order 0
    value = load_metric(name).compute(**{"negative_log_likelihoods": nlls, COUNT[name]: [1, 1, 1]})
    assert value == {name: pytest.approx(expected)}


def test_perplexity_beyond_a_float_is_infinite():
    assert load_metric("perplexity").compute(negative_log_likelihoods=[1e6], tokens=[1]) == {"perplexity": math.inf}


@pytest.mark.parametrize("name", COUNT)
@pytest.mark.parametrize(
    ("nlls", "counts", "culprit"),
    [
        ([1.0, math.nan], [1, 1], "negative_log_likelihoods: nan"),
        ([math.inf, 1.0], [1, 1], "negative_log_likelihoods: inf"),
        ([1.0, 1.0], [0, 5], "COUNT: 0"),
        ([1.0, 1.0], [5, -1], "COUNT: -1"),
    ],
)
def test_errors(name, nlls, counts, culprit):
    with pytest.raises(ValueError, match=f"^{culprit.replace('COUNT', COUNT[name])} .*; leave out") as caught:
        load_metric(name).compute(**{"negative_log_likelihoods": nlls, COUNT[name]: counts})
    assert "\n" not in str(caught.value)


def test_unknown_names_get_the_nearest():
    for name, near in {"perplexitty": "perplexity", "bits-per-byte": "bits_per_byte", "bpb": "bits_per_byte"}.items():
        with pytest.raises(ValueError, match=re.escape(f"name: {name!r}") + f".*did you mean {near!r}"):
            load_metric(name)
