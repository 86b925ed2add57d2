"""Perplexity of a language model from sums over batches: exp(total negative log-likelihood / total tokens)."""

# One import a line: the loader of `evaluate` reads them with a pattern that knows no other form.
import math

import datasets
import evaluate

_DESCRIPTION = """
Perplexity of a language model over a text, exp(sum of negative log-likelihoods in nats / number of tokens). Sums over
batches go in, so that batches of different sizes count by their tokens.
"""

_INPUTS = """
Args:
    negative_log_likelihoods: For each batch, the sum over its tokens of -ln p(token), in nats.
    tokens: For each batch, the number of tokens in that sum; at least 1.
Returns:
    perplexity: From 1 (every token was certain) upwards; infinite where it exceeds the range of a float.
Raises:
    ValueError: A sum is not finite or a count is below 1.
"""

_CITATION = ""


class Perplexity(evaluate.Metric):
    """exp(sum of `negative_log_likelihoods` / sum of `tokens`); `inputs_description` describes the arguments."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"negative_log_likelihoods": datasets.Value("float64"), "tokens": datasets.Value("int64")}
            ),
        )

    def _compute(self, negative_log_likelihoods: list[float], tokens: list[int]) -> dict[str, float]:
        for value in negative_log_likelihoods:
            if not math.isfinite(value):
                raise ValueError(f"negative_log_likelihoods: {value} is not finite; leave out or mend that batch")
        for count in tokens:
            if count < 1:
                raise ValueError(f"tokens: {count} is not a positive count; leave out batches without tokens")
        try:
            return {"perplexity": math.exp(math.fsum(negative_log_likelihoods) / sum(tokens))}
        except OverflowError:
            return {"perplexity": math.inf}
