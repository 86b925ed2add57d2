"""Leaner training computes what the model of `transformers` computes."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from mars_hf.models import build_gpt2, gpt2_config, lean, make_lean

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 97, "n_positions": 16}


def gpt2():
    return build_gpt2(gpt2_config(**SIZES))


def llama():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, intermediate_size=64, **sizes)).train()


@pytest.fixture(autouse=True)
def compile_anew():
    """torch.compile gives up on a function that it has compiled for too many models."""
    torch._dynamo.reset()


def pair(build, *, compiled):
    torch.manual_seed(3)
    stock, ours = build(), build()
    stock.config.use_cache = ours.config.use_cache = False  # as the Trainer does
    ours.load_state_dict(stock.state_dict())
    make_lean(ours, compiled=compiled)
    return stock, ours


def tokens(rows=4, length=16):
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(5))


def trained(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("num_items", [None, torch.tensor(30)])
def test_loss_and_gradients(build, autocast, num_items, monkeypatch):
    monkeypatch.setattr(lean, "CPU_CHUNK", 97 * 7)  # several chunks, the last of another length
    stock, ours = pair(build, compiled=False)
    labels = tokens()
    labels[0, :9] = labels[2] = -100
    losses = []
    for model in (stock, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(input_ids=tokens(), labels=labels, num_items_in_batch=num_items).loss)
        (losses[-1] * 3).backward()
    assert_close(*losses, rtol=1e-6, atol=0)
    bound = {"rtol": 2**-7, "atol": 1e-4} if autocast else {"rtol": 1e-5, "atol": 1e-7}
    assert_close(trained(ours), trained(stock), **bound)


def test_a_second_backward_is_refused():
    """The gradient has taken the place of what it was computed from."""
    _, ours = pair(gpt2, compiled=False)
    loss = ours(input_ids=tokens(), labels=tokens()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss anew"):
        loss.backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # hides it from autograd
        loss = ours(input_ids=tokens(), labels=tokens()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss anew"):
        loss.backward()


def test_gradients_of_the_loss_alone_by_hand():
    """softmax - [target] for what counts, 0 for what does not, in the dtype of the logits."""
    logits = torch.randn(6, 5, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.tensor([0, 1, -100, 3, 4, 4])
    lean.CrossEntropy.apply(logits, targets, -100).backward()
    expected = torch.softmax(logits.detach().float(), -1)
    for row, target in enumerate(targets):
        expected[row] = 0 if target == -100 else expected[row] - torch.eye(5)[target]
    assert logits.grad.dtype == torch.bfloat16
    assert_close(logits.grad.float(), expected, rtol=2**-8, atol=1e-6)


def test_only_frozen_zero_biases_are_left_out():
    model = gpt2()
    model.transformer.h[0].attn.c_attn.bias[3] = 0.5
    model.transformer.h[1].mlp.c_fc.bias.requires_grad_(True)
    kept = {model.transformer.h[0].attn.c_attn, model.transformer.h[1].mlp.c_fc}
    state = model.state_dict()
    expected = model.eval()(tokens()).logits
    make_lean(model, compiled=False)
    left_out = {module for module in model.modules() if isinstance(module, lean.ZeroBiasConv1D)}
    assert len(left_out) == 3 * 4 - 2 and not left_out & kept
    assert_close(model(tokens()).logits, expected, rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == list(state), "an ordinary checkpoint"


def test_another_loss_stays():
    stock, ours = gpt2(), gpt2()
    assert stock.loss_function is ForCausalLMLoss
    ours.loss_function = other = lambda *args, **kwargs: torch.tensor(7.0)
    make_lean(ours, compiled=False)
    assert ours.loss_function is other


class Graphs:
    """A backend of torch.compile that runs the graph as it is, and keeps how it calls attention."""

    def __init__(self):
        self.masked = []

    def __call__(self, graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                self.masked.append((node.kwargs.get("attn_mask") is not None, node.kwargs.get("is_causal")))
        return graph.forward


def of_type(model_type):
    """A tiny model of this architecture, without the cache as under the Trainer."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
    known = AutoConfig.for_model(model_type)
    for name in ("num_key_value_heads", "intermediate_size", "ffn_dim", "word_embed_proj_dim", "num_local_experts"):
        if hasattr(known, name):
            sizes[name] = {"num_key_value_heads": 2, "num_local_experts": 4}.get(name, 32)
    sizes |= {"pad_token_id": 0, "sliding_window": None, "keep_window_size": 4}
    sizes |= {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout") if hasattr(known, name)}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).train()


@pytest.mark.parametrize("model_type", [*lean.CAUSAL_ALONE, "doge"])
def test_every_architecture_stays_what_it_is_when_compiled(model_type):
    """Doge masks more than the future, and must not lose its masks."""
    stock, ours = pair(lambda: of_type(model_type), compiled=True)
    assert (ours.config._attn_implementation == lean.BLOCKS) == (model_type in lean.CAUSAL_ALONE)
    later = tokens()
    later[:, 12:] = 5
    expected = stock(input_ids=tokens(), labels=tokens())
    compiled = torch.compile(ours, backend="eager")
    output = compiled(input_ids=tokens(), labels=tokens())
    assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert_close(output.logits, expected.logits.detach(), rtol=1e-4, atol=1e-5)
    seen = compiled(input_ids=later, labels=later).logits[:, :12]
    assert_close(seen, output.logits[:, :12], rtol=1e-4, atol=1e-5, msg="a token saw the future")
    expected.loss.backward()
    output.loss.backward()
    assert_close(trained(ours), trained(stock), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_compiled(build):
    stock, ours = pair(build, compiled=True)
    graphs = {stock: Graphs(), ours: Graphs()}
    outputs = [torch.compile(model, backend=graphs[model])(input_ids=tokens(), labels=tokens()) for model in graphs]
    for output in outputs:
        output.loss.backward()
    layers = ours.config.num_hidden_layers
    assert graphs[stock].masked == [(True, False)] * layers, "transformers needs no help any more: delete it here"
    assert graphs[ours].masked == [(False, True)] * layers
    assert outputs[0].logits.requires_grad and not outputs[1].logits.requires_grad
    assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-6, atol=0)
    assert_close(outputs[1].logits, outputs[0].logits.detach(), rtol=1e-5, atol=1e-6)
    assert_close(trained(ours), trained(stock), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_padding_texts_in_a_block_and_generation_stay(build):
    stock, ours = (model.eval() for model in pair(build, compiled=True))
    mask = torch.ones_like(tokens())
    mask[0, :6] = mask[1, 9:] = 0
    packed = torch.arange(16).remainder(7).expand(4, -1)
    compiled = torch.compile(ours, backend="eager")
    for kwargs in ({"attention_mask": mask}, {"position_ids": packed}):
        expected = stock(tokens(), **kwargs).logits
        assert_close(ours(tokens(), **kwargs).logits, expected, rtol=1e-5, atol=1e-6)
    assert_close(compiled(tokens(), attention_mask=mask).logits, stock(tokens(), attention_mask=mask).logits)
    start = {
        "input_ids": tokens(length=8),
        "attention_mask": mask[:, :8],
        "max_new_tokens": 6,
        "do_sample": False,
        "use_cache": True,
    }
    assert torch.equal(ours.generate(**start, pad_token_id=0), stock.generate(**start, pad_token_id=0))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_checkpoint_is_an_ordinary_one(compiled, tmp_path):
    stock, ours = pair(gpt2, compiled=compiled)
    for name, model in (("stock", stock), ("ours", ours)):
        model.save_pretrained(tmp_path / name)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "ours")]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded.transformer.h[0].attn.c_attn) is type(stock.transformer.h[0].attn.c_attn)
    assert loaded.config._attn_implementation == "sdpa"
    assert_close(loaded(tokens()).logits, stock.eval()(tokens()).logits)
