"""Stands for the export tests that the archive lacks; ours are in `tests/test_ecosystem.py`."""


class ExportTesterMixin:
    """What the common model tests inherit."""
