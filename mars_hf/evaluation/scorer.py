"""The model as lm-eval sees it."""

import hashlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from mars_hf.evaluation.ranks import Ranks

# Sequences in a forward pass of "auto": as many as make up so many tokens, and never more than so many.
AUTO_TOKENS, AUTO_SEQUENCES = 4096, 64

Request = tuple[Any, list[int], list[int]]  # the texts, and the tokens of prompt and continuation


class Scorer(HFLM):
    """lm-eval's own model class, made to hold on short contexts, to fail with a message and to divide its work.

    A request that does not fit the model's context loses tokens on the left of its prompt, as always in lm-eval, and is
    counted. A continuation that does not fit on its own, which lm-eval refuses, is scored in pieces, each after as much
    of the text before it as fits: log p(piece 1 | prompt) + log p(piece 2 | prompt, piece 1) + ...

    Batches go to the processes in turn; all of them get all scores, so that to lm-eval each looks like a single one.

    Args:
        model: A causal transformers model, switched to eval mode.
        tokenizer: Its tokenizer; gets a pad token if it has none.
        batch_size: Sequences in a forward pass, or "auto".
        ranks: The processes that score together.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int | str, ranks: Ranks) -> None:
        limit = AUTO_SEQUENCES if batch_size == "auto" else batch_size
        # lm-eval ties the weights as the config says, also those that somebody untied on purpose.
        model.tie_weights = lambda: None
        try:
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=limit, backend="causal")
        finally:
            del model.tie_weights
        self.truncated = 0
        self._ranks, self._tokens = ranks, AUTO_TOKENS if batch_size == "auto" else math.inf
        # The class's signature: accelerate replaces the method of the object by one that takes anything.
        known = inspect.signature(type(model).forward).parameters
        self._options = {"use_cache": False} if "use_cache" in known else {}
        self._slices = "logits_to_keep" in known
        self._kept: dict[str, int] = {}

    def _loglikelihood_tokens(self, requests: list[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        # Processes with other requests would wait for each other for ever.
        digest = hashlib.sha256(repr([request[1:] for request in requests]).encode()).hexdigest()
        if self._ranks.size > 1 and len(set(self._ranks.gather(lambda: digest))) > 1:
            raise ValueError("tasks: the processes have different items; give all of them the same data_dir")
        window = self.max_length
        vocabulary = self.model.get_input_embeddings().num_embeddings
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

        batches = list(self._batches(pieces))
        scored = self._ranks.share(batches, lambda batch: self._score(pieces, batch, **kwargs))
        scores = [(0.0, True)] * len(requests)
        for index, (logprob, greedy) in sorted(pair for part in scored for pair in part):
            owner = owners[index]
            scores[owner] = (scores[owner][0] + logprob, scores[owner][1] and greedy)
        # The largest of several NaNs is the first, so a broken model would get a score that looks like any other.
        if broken := sum(math.isnan(logprob) for logprob, _ in scores):
            raise ValueError(f"model: {broken} of {len(scores)} log-likelihoods are NaN; it cannot be scored")
        return scores

    def generate_until(self, requests: list[Any], **kwargs: Any) -> list[str]:
        """Answers as lm-eval; every process generates all of them."""
        try:
            return super().generate_until(requests, **kwargs)
        except AssertionError as error:
            raise ValueError(
                f"tasks: {requests[0].task_name!r} generates text, which fails here ({error}); choose another task"
            ) from error

    def _batches(self, pieces: list[Request]) -> Iterator[list[list[int]]]:
        """Forward passes, the longest first; each a list of sequences, each a list of the pieces that share it.

        Pieces that differ in the last token only share a sequence, as in lm-eval.
        """
        sequences: dict[tuple[int, ...], list[int]] = {}
        for index, (_, prompt, continuation) in enumerate(pieces):
            sequences.setdefault((*prompt, *continuation[:-1]), []).append(index)
        order = sorted(sequences, key=len, reverse=True)
        while order:
            longest = max(1, min(len(order[0]), self.max_length))
            size = int(max(1, min(self.batch_size, self._tokens // longest)))
            yield [sequences[tokens] for tokens in order[:size]]
            order = order[size:]

    def _score(
        self, pieces: list[Request], batch: list[list[int]], **kwargs: Any
    ) -> list[tuple[int, tuple[float, bool]]]:
        """The pieces of one batch, by index, and their scores."""
        indices = [index for sequence in batch for index in sequence]
        requests = [pieces[index] for index in indices]
        lengths = [min(len(prompt) + len(continuation) - 1, self.max_length) for _, prompt, continuation in requests]
        # No logits are computed for the positions that lie within every prompt.
        keep = max(max(lengths) - length + len(request[2]) for request, length in zip(requests, lengths))
        self._kept = {"logits_to_keep": keep} if self._slices else {}
        return list(zip(indices, super()._loglikelihood_tokens(requests, **kwargs)))

    def _model_call(self, inps: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # Without autocast, as in lm-eval; a model that the Trainer made to compute in bf16 still does.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self.model(inps, **self._options, **self._kept).logits
