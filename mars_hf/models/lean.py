"""What a model of `transformers` does in training that training on whole blocks does not need, left out.

The function that the model computes stays the same, and so does its checkpoint. For whoever trains with the model's own
loss on blocks without padding, each attended to as one text: the recipe does.
"""

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax, nll_loss, pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

BLOCKS = "sdpa_of_blocks"
# Architectures (model_type) whose code asks neither which attention it has nor for a mask that it changes afterwards.
# Doge adds a pattern to the causal mask, DeepSeek-V3.2 and MiniMax-M3 select keys only under the name "sdpa".
CAUSAL_ALONE = ("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt", "qwen2", "qwen3")
# Elements of the log-probabilities that stay in a core's cache from one operation to the next.
CPU_CHUNK = 2**18


def make_lean(model: PreTrainedModel, *, compiled: bool) -> None:
    """Leaves out what training on whole blocks does not need.

    - Biases of GPT-2 that are zero and do not train (`build_gpt2`) are not added. Kernels for CPUs write the bias into
      the result first and then add the product to it.
    - Eager, the loss keeps one array of tokens x vocabulary, and its gradient is written over it (`CrossEntropy`):
      torch's own takes two more and twice the time. Compiled, both are fused anyway.
    - Compiled, a model of `transformers` cannot find out that no text ends within a block, and masks the attention
      explicitly: slower, and the flash kernel of CUDA takes no mask. Here a block needs none but the causal one. For
      the architectures in `CAUSAL_ALONE`; others mask as ever.
    - Compiled, the logits are a result of their own beside the loss, whose gradient of zeros, tokens x vocabulary, is
      written, read and added in every backward pass. Here they come without a gradient in training.

    Args:
        model: Changed in place, after its weights are loaded: biases that become other than zero later are ignored.
            Not for training with a loss computed from `logits` when compiled, nor for several texts in a block told
            apart by their `position_ids` then.
        compiled: Whether it will run under `torch.compile`.
    """
    for module in model.modules():
        if isinstance(module, Conv1D) and not module.bias.requires_grad and not module.bias.any():
            module.__class__ = ZeroBiasConv1D
    if compiled:
        if model.config.model_type in CAUSAL_ALONE and model.config._attn_implementation == "sdpa":
            AttentionInterface.register(BLOCKS, sdpa_attention_forward)
            AttentionMaskInterface.register(BLOCKS, mask_of_blocks)
            model.set_attn_implementation(BLOCKS)
        detach_logits(model)
    elif model.loss_function is ForCausalLMLoss:
        model.loss_function = causal_loss


class ZeroBiasConv1D(Conv1D):
    """GPT-2's linear layer, whose frozen bias of zero remains for the checkpoint alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def mask_of_blocks(*, q_length: int, kv_length: int, use_vmap: bool = False, **others: Any) -> Tensor | None:
    """The mask of SDPA, and none (which makes SDPA causal) for a whole block in a compiled model.

    A cache, padding, a window and a pattern of the model's own (`use_vmap`) are masked as ever.
    """
    more_than_causal = use_vmap or any(others.get(name) is not None for name in ("attention_mask", "local_size"))
    if torch.compiler.is_compiling() and q_length == kv_length and not more_than_causal:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, use_vmap=use_vmap, **others)


def detach_logits(model: PreTrainedModel) -> None:
    """Replaces the model's forward by one whose logits carry no gradient in training, where it returns a loss."""

    @wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        outputs = type(self).forward(self, *args, **kwargs)
        if self.training and getattr(outputs, "loss", None) is not None and outputs.logits is not None:
            outputs.logits = outputs.logits.detach()
        return outputs

    model.forward = MethodType(forward, model)


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The causal loss of `transformers`, with its arguments: mean over the tokens, or sum / num_items_in_batch."""
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    loss = CrossEntropy.apply(logits.view(-1, vocab_size), targets, ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


class CrossEntropy(torch.autograd.Function):
    """-sum over tokens of log softmax(logits)[target], in float32; its gradient is softmax(logits) - [target].

    The backward pass overwrites the log-probabilities with the gradient, so there is no second one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        log_probs = log_softmax(logits, -1, dtype=torch.float32)
        ctx.save_for_backward(log_probs, targets)
        ctx.ignore_index, ctx.dtype, ctx.spent = ignore_index, logits.dtype, False
        return nll_loss(log_probs, targets, ignore_index=ignore_index, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.spent:
            raise RuntimeError("a second backward() through one loss of a lean model: compute the loss anew")
        ctx.spent = True
        log_probs, targets = ctx.saved_tensors
        counted = targets != ctx.ignore_index
        columns = targets.where(counted, 0)[:, None]
        scale = grad.where(counted, 0)[:, None]
        rows = max(1, CPU_CHUNK // log_probs.shape[1]) if log_probs.device.type == "cpu" else len(log_probs)
        for part, column, factor in zip(log_probs.split(rows), columns.split(rows), scale.split(rows)):
            part.exp_().scatter_add_(1, column, -torch.ones_like(factor)).mul_(factor)
        return log_probs.to(ctx.dtype), None, None
