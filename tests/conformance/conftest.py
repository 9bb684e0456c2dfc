"""A skip of a common test that `skips.py` does not explain is a failure: it may hide what no longer works."""

import pytest
from transformers.models.auto import modeling_auto

from tests.conformance.archive import TABLES
from tests.conformance.skips import reason_for

collect_ignore = ["supplied"]


@pytest.fixture(autouse=True)
def refuse_deprecations():
    """Takes the place of the fixture for our own tests: the library's use what is deprecated, to see that it works."""


@pytest.fixture(autouse=True)
def our_models_in_the_tables(monkeypatch):
    for table, names in TABLES.items():
        monkeypatch.setitem(getattr(modeling_auto, table), "vanilla_trm", names)


def pytest_collection_modifyitems(items):
    for item in items:
        if "conformance" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.outcome == "skipped" and reason_for(item.name) is None:
        report.outcome = "failed"
        report.longrepr = f"{item.name} was skipped, and tests/conformance/skips.py gives no reason: {report.longrepr}"
    return report
