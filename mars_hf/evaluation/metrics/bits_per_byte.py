"""Bits per byte of a language model from sums over batches: total negative log-likelihood / (ln 2 * total bytes)."""

# One import a line: the loader of `evaluate` reads them with a pattern that knows no other form.
import math

import datasets
import evaluate

_DESCRIPTION = """
Bits a language model needs for a byte of text, sum of negative log-likelihoods in nats / (ln 2 * number of bytes).
Unlike perplexity it compares models with different tokenizers. Sums over batches go in.
"""

_INPUTS = """
Args:
    negative_log_likelihoods: For each batch, the sum over its tokens of -ln p(token), in nats.
    bytes: For each batch, the number of UTF-8 bytes of the text those tokens stand for; at least 1.
Returns:
    bits_per_byte: From 0 (every token was certain) upwards.
Raises:
    ValueError: A sum is not finite or a count is below 1.
"""

_CITATION = ""


class BitsPerByte(evaluate.Metric):
    """sum of `negative_log_likelihoods` / (ln 2 * sum of `bytes`); `inputs_description` describes the arguments."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"negative_log_likelihoods": datasets.Value("float64"), "bytes": datasets.Value("int64")}
            ),
        )

    def _compute(self, negative_log_likelihoods: list[float], bytes: list[int]) -> dict[str, float]:
        for value in negative_log_likelihoods:
            if not math.isfinite(value):
                raise ValueError(f"negative_log_likelihoods: {value} is not finite; leave out or mend that batch")
        for count in bytes:
            if count < 1:
                raise ValueError(f"bytes: {count} is not a positive count; leave out batches without text")
        return {"bits_per_byte": math.fsum(negative_log_likelihoods) / (math.log(2.0) * sum(bytes))}
