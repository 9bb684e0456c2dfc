"""Which configs the common tests run on: every two settings together at least once."""

from itertools import combinations, product

FACTORS = {
    "sharing": {
        "none": {},
        "attention": {"parameter_sharing": "attention"},
        "ffn": {"parameter_sharing": "ffn"},
        "all": {"parameter_sharing": "all"},
    },
    "ties": {
        "tied": {},
        "untied": {"tie_word_embeddings": False},
        "separate": {"share_encoder_decoder_embeddings": False},
    },
    "depths": {"equal": {}, "unequal": {"encoder_layers": 1}},
    "embeddings": {"full": {}, "factorised": {"embedding_size": 24}},
}


def pairwise(factors):
    """Rows of settings, a name for each factor, in which any two settings of different factors meet.

    Greedy: the row that holds most of the pairs still missing comes next. Not always the fewest rows, but close.
    """

    def pairs(row):
        return set(combinations(enumerate(row), 2))

    rows = list(product(*factors.values()))
    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def changes_of(row):
    """The changes to the tester's config that a row stands for."""
    return {
        field: value
        for settings, name in zip(FACTORS.values(), row, strict=True)
        for field, value in settings[name].items()
    }


ROWS = pairwise(FACTORS)
