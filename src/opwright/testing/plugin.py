"""The pytest plugin: markers, and the parameter `opwright_case`."""

from __future__ import annotations

import pytest

_MARKERS = (
    "opwright(target, *, dtypes=(), only='', samples=None): whose cases `opwright_case` is; opwright.testing.cases sets it",
    "gpu: needs a GPU",
    "slow: takes minutes",
)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the markers known to `--strict-markers`."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test that takes `opwright_case` one item for each case of its operator's sweep.

    Raises:
        CollectError: the mark is missing, or names no operator or no case.
    """
    if "opwright_case" not in metafunc.fixturenames:
        return
    from opwright.errors import OpwrightError
    from opwright.testing.sweep import find_cases

    marker = metafunc.definition.get_closest_marker("opwright")
    try:
        if marker is None or len(marker.args) != 1:
            raise TypeError("it takes `opwright_case` of no operator\n\nhint: `@opwright.testing.cases(op)` above it")
        found = find_cases(*marker.args, **marker.kwargs)
    except (OpwrightError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
    metafunc.parametrize("opwright_case", found, ids=str, indirect=True)


@pytest.fixture
def opwright_case(request: pytest.FixtureRequest):
    """One input of the operator in the mark: `.args`, `.kwargs`, `.label`; fresh tensors for each test."""
    return request.param.fresh()
