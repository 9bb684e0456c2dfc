"""Stands for the generation tests that the archive lacks; ours are in `tests/test_modeling.py` and
`tests/test_ecosystem.py`.
"""


class GenerationTesterMixin:
    """What the common model tests demand of every class that tests a model with `generate`."""
