"""BLEU as papers on Multi30k English-German print it, for `--metrics training/metrics/multi30k_bleu.py`.

Hypotheses and references are lower-cased, their punctuation is normalised and they are tokenised by Moses' rules for
German, as the data set's own `*.lc.norm.tok.de` are; BLEU is sacreBLEU's without a tokenizer of its own. The figure is
above that of the same text with mixed case, and comparable with those papers alone.
"""

from typing import Any

import datasets
import evaluate
import sacrebleu
from sacremoses import MosesPunctNormalizer, MosesTokenizer


class Multi30kBleu(evaluate.Metric):
    """The metric as a module of `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(
            description="BLEU of lower-cased, punctuation-normalised text in Moses' tokens, German.",
            citation="",
            features=texts,
        )

    def _compute(self, predictions: list[str], references: list[str], **_: Any) -> dict[str, float]:
        """Return the score, from 0 to 100."""
        normalizer, tokenizer = MosesPunctNormalizer("de"), MosesTokenizer("de")

        def tokenised(texts: list[str]) -> list[str]:
            return [tokenizer.tokenize(normalizer.normalize(text.lower()), return_str=True) for text in texts]

        bleu = sacrebleu.BLEU(tokenize="none", force=True)
        return {"multi30k_bleu": bleu.corpus_score(tokenised(predictions), [tokenised(references)]).score}
