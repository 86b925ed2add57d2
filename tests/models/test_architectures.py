"""Any architecture from a configuration: what the data decides, causality, errors of one line."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    MptConfig,
    T5Config,
)

from mars_hf.models import build_model, configure, fit_to_data, gpt2_config, load_config

LLAMA = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096, "dtype": "bfloat16"},
}


class Tokenizer:
    """As many tokens as it is told; only what a configuration asks."""

    bos_token_id, eos_token_id, pad_token_id = 5, 6, 7

    def __init__(self, tokens, **ids):
        self.tokens = tokens
        self.__dict__.update(ids)

    def __len__(self):
        return self.tokens


@pytest.fixture
def llama(tmp_path):
    LlamaConfig(**LLAMA).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.mark.parametrize("file", ["", "/config.json"])
def test_a_configuration_is_fitted_to_the_data(file, llama):
    config = configure(Tokenizer(100), 16, model_config=llama + file, model_overrides='{"num_hidden_layers": 2}')
    assert (config.vocab_size, config.max_position_embeddings, config.num_hidden_layers) == (100, 16, 2)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, 6, 7)
    model = build_model(config)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "weights in the dtype of the configuration"
    assert model.get_input_embeddings().weight.shape == (100, 32)
    ids = torch.randint(100, (2, 16))
    assert torch.isfinite(model(ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("own", "tokens", "vocabulary"),
    [(50304, 50257, 50304), (50304, 50304, 50304), (50304, 50305, 50305), (50304, 2048, 2048), (1000, 991, 1000)],
)
def test_padding_of_a_vocabulary_is_kept(own, tokens, vocabulary):
    assert fit_to_data(LlamaConfig(vocab_size=own), Tokenizer(tokens), 16).vocab_size == vocabulary


def test_an_explicit_vocabulary_is_kept(llama):
    config = configure(Tokenizer(100), 16, model_config=llama, model_overrides='{"vocab_size": 500}')
    assert config.vocab_size == 500


def test_the_papers_model_with_the_gpt2_tokenizer_is_the_papers_model():
    tokenizer = Tokenizer(50257, bos_token_id=50256, eos_token_id=50256, pad_token_id=50256)
    fitted = configure(tokenizer, 1024, model_size="medium", n_layer=None)
    assert fitted.to_dict() == gpt2_config("medium").to_dict()


def test_a_padding_token_that_is_eos_would_never_train(llama):
    config = configure(Tokenizer(100, pad_token_id=6), 16, model_config=llama)
    assert config.pad_token_id is None
    model = build_model(config)
    ids = torch.full((1, 4), 6)
    model(ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad[6].any(), "eos gets no gradient"


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4),
        GPTNeoXConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4),
        MixtralConfig(**LLAMA, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_no_model_sees_what_it_has_to_predict(config, tmp_path):
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = build_model(configure(Tokenizer(50), 8, model_config=str(tmp_path))).eval()
    ids = torch.randint(50, (1, 8))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 50
    assert_close(model(other).logits[:, :-1], model(ids).logits[:, :-1], atol=1e-6, rtol=0, msg=lambda m: m)


def test_gpt2_by_configuration_has_frozen_biases_as_by_size(tmp_path):
    GPT2Config(n_layer=1, n_head=2, n_embd=8).save_pretrained(tmp_path)
    config = configure(Tokenizer(50), 8, model_config=str(tmp_path))
    assert {p.requires_grad for name, p in build_model(config).named_parameters() if name.endswith("bias")} == {False}
    assert all(p.requires_grad for p in build_model(config, bias=True).parameters())


def test_a_saved_model_loads_anywhere(llama, tmp_path):
    model = build_model(configure(Tokenizer(100), 16, model_config=llama)).eval()
    model.save_pretrained(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    ids = torch.randint(100, (1, 16))
    assert_close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0, msg=lambda m: m)


@pytest.mark.parametrize("kind", ["bart", "whisper", "trocr", "xlm", "xlnet", "roberta"])
def test_what_would_learn_to_copy_or_see_the_future_is_refused(kind, tmp_path):
    """The loss of BART's decoder, say, compares every token with itself: it falls to 0, and nothing was learned."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(ValueError, match=f"model_type '{kind}', which transformers does not train to predict") as error:
        load_config(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_block_may_be_longer_than_the_configuration_says(tmp_path):
    MptConfig(d_model=32, n_layers=1, n_heads=4, max_seq_len=8).save_pretrained(tmp_path)
    model = build_model(configure(Tokenizer(50), 16, model_config=str(tmp_path)))
    assert model(torch.randint(50, (1, 16))).logits.shape == (1, 16, 50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_config": "nowhere/config.json"}, "model_config='nowhere/config.json' is not a file"),
        ({"model_config": "T5"}, "is of model_type 't5', no causal language model of transformers"),
        (
            {"model_config": "LLAMA", "model_overrides": '{"num_layer": 2}'},
            "'num_layer' is no field of LlamaConfig: ",
        ),
        ({"model_config": "LLAMA", "model_overrides": "2"}, "model_overrides='2' is no JSON object"),
        ({"model_config": "LLAMA", "model_overrides": "{"}, "model_overrides='{' is no JSON object"),
        ({"model_config": "LLAMA", "model_overrides": '{"vocab_size": 99}'}, "vocab_size=99 of the model is too small"),
        ({"model_config": "LLAMA", "model_overrides": '{"hidden_size": "a"}'}, "with model_overrides: .*hidden_size"),
        ({"model_overrides": '{"vocab_sise": 99}'}, "vocab_sise=99 is no field of GPT2Config"),
    ],
    ids=range(8),
)
def test_errors_are_one_line(arguments, message, llama, tmp_path):
    T5Config().save_pretrained(tmp_path / "t5")
    places = {"T5": str(tmp_path / "t5"), "LLAMA": llama}
    arguments = {**arguments, "model_config": places.get(name := arguments.get("model_config"), name)}
    with pytest.raises(ValueError, match=message) as raised:
        configure(Tokenizer(100), 16, **arguments)
    assert "\n" not in str(raised.value)


def test_a_hub_name_without_a_network_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="model_config='someone/some-model' cannot be loaded: ") as raised:
        load_config("someone/some-model")
    assert "\n" not in str(raised.value)
