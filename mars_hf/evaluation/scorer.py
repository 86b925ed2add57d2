"""The model as lm-eval sees it."""

import math
from typing import Any

from lm_eval.models.huggingface import HFLM


class Scorer(HFLM):
    """lm-eval's own model class, made to hold on short contexts and to fail with a message.

    A request that does not fit the model's context loses tokens on the left of its prompt, as always in lm-eval, and is
    counted. A continuation that does not fit on its own, which lm-eval refuses, is scored in pieces, each after as much
    of the text before it as fits: log p(piece 1 | prompt) + log p(piece 2 | prompt, piece 1) + ...

    Args:
        model: A causal transformers model, switched to eval mode.
        tokenizer: Its tokenizer; gets a pad token if it has none.
        batch_size: Sequences in a forward pass.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal")
        self.truncated = 0

    def _loglikelihood_tokens(self, requests: list, **kwargs: Any) -> list[tuple[float, bool]]:
        window = self.max_length
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        pieces, owners = [], []
        for owner, (texts, prompt, continuation) in enumerate(requests):
            if not continuation:
                raise ValueError(f"tokenizer: no token of its own for the continuation {texts[1]!r}; use another one")
            if (largest := max(*prompt, *continuation)) >= vocabulary:
                raise ValueError(
                    f"tokenizer: token {largest} is outside the model's vocabulary of {vocabulary}; "
                    "pass the tokenizer the model was trained with"
                )
            self.truncated += len(prompt) + len(continuation) > window + 1
            # Half a window for a piece leaves half a window of text before it.
            size = len(continuation) if len(continuation) <= window else max(1, window // 2)
            for start in range(0, len(continuation), size):
                pieces.append((texts, prompt + continuation[:start], continuation[start : start + size]))
                owners.append(owner)

        scores = [(0.0, True)] * len(requests)
        for owner, (logprob, greedy) in zip(owners, super()._loglikelihood_tokens(pieces, **kwargs)):
            scores[owner] = (scores[owner][0] + logprob, scores[owner][1] and greedy)
        # The largest of several NaNs is the first, so a broken model would get a score that looks like any other.
        if broken := sum(math.isnan(logprob) for logprob, _ in scores):
            raise ValueError(f"model: {broken} of {len(scores)} log-likelihoods are NaN; it cannot be scored")
        return scores
