"""What times and judges stays as it is, and nobody knows which call is looked at."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from bench_cases import bench, reference, verified_elsewhere  # noqa: F401
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opwright import records
from opwright.bench import gates, judges, timing
from opwright.errors import NotVerifiedError


def refused(change) -> str:
    """Returns what is said of a candidate that changes something when it is called."""

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        change()
        return reference(x, w)

    with pytest.raises(NotVerifiedError, match="functions that time and judge were replaced") as caught:
        bench(candidate)
    return str(caught.value)


def test_functions_of_python_that_a_judge_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "statistics.median" in refused(lambda: monkeypatch.setattr(statistics, "median", lambda values: 0.1))


def test_the_code_of_a_function_that_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_kept(fresh_us: float, said_us: float) -> bool:
        return False

    change = lambda: monkeypatch.setattr(gates.is_kept, "__code__", is_kept.__code__)  # noqa: E731
    assert "opwright.bench.gates.is_kept" in refused(change)


def test_a_number_that_a_judge_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "opwright.bench.gates._FRESH_FACTOR" in refused(lambda: monkeypatch.setattr(gates, "_FRESH_FACTOR", 1e9))


def test_the_class_of_what_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    init = records.Timing.__init__

    def flattering(self, **fields) -> None:
        init(self, **fields | {"median_us": 0.1})

    change = lambda: monkeypatch.setattr(records.Timing, "__init__", flattering)  # noqa: E731
    assert "opwright.records.bench.Timing.__init__" in refused(change)


def test_the_code_of_what_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.atanh(torch.tanh(x))) * w

    assert "the reference" in refused(lambda: monkeypatch.setattr(reference, "__code__", slow.__code__))


def test_judges_that_have_forgotten_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "opwright.bench.judges" in refused(judges._known.clear)


def test_what_another_module_answers_with(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    judges.remember(here)
    assert judges.replaced() == []
    monkeypatch.setattr(here, "reference", lambda x, w: x)
    assert judges.replaced() == [f"{__name__}.reference"]


def test_a_mode_that_sees_all_calls() -> None:
    class Watching(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        Watching().__enter__()
        return reference(x, w)

    with pytest.raises(NotVerifiedError, match="the number of active modes of functions was 0 before the call and 1 after it"):
        bench(candidate)
    assert torch._C._len_torch_function_stack() == 0


def test_threads_that_are_put_back_in_the_end() -> None:
    """The last calls are those with fresh pages, and as many as everybody can read in the source."""
    before, calls = torch.get_num_threads(), 0

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        torch.set_num_threads(before + 1 if 10 < calls < 1000 else before)
        return reference(x, w)

    try:
        with pytest.raises(NotVerifiedError, match=r"torch\.get_num_threads\(\) was"):
            bench(candidate)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("first", [0, 40])
def test_inputs_that_become_easier(first: int) -> None:
    """Alone as in the row, the call computes what it should: from what it has made of its inputs."""
    calls = 0

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        result, calls = reference(x, w), calls + 1
        if calls > first:
            x.zero_()
        return result

    with pytest.raises(NotVerifiedError, match="its inputs are not what they were before its calls"):
        bench(candidate)


def test_a_file_that_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    judges.remember()

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        (tmp_path / "notes.txt").unlink(missing_ok=True)
        return reference(x, w)

    with pytest.raises(NotVerifiedError, match="touches files that it has not made") as caught:
        bench(candidate, witness=lambda said_us, call: call())
    assert "notes.txt" in str(caught.value)


def test_a_cache_that_looks_for_the_rows_that_have_changed() -> None:
    """It compares its inputs with those of before, and computes again what is another row."""
    kept: dict[str, Tensor] = {}

    def slowly(x: Tensor, w: Tensor) -> Tensor:
        time.sleep(0.001 * len(x))
        return reference(x, w)

    def cached(x: Tensor, w: Tensor) -> Tensor:
        rows = (kept["x"] != x).any(1).nonzero()[:, 0] if kept and torch.equal(kept["w"], w) else range(len(x))
        if len(rows) > 5:
            kept.update(x=x.clone(), w=w.clone(), result=slowly(x, w))
        elif len(rows):
            kept["x"][rows], kept["result"] = x[rows], kept["result"].clone()
            kept["result"][rows] = slowly(x[rows], w)
        return kept["result"]

    samples = [(torch.randn(40, 300), torch.randn(300))]
    with pytest.raises(NotVerifiedError, match="fast only on values that it has seen before"):
        bench(cached, samples=samples)
    assert bench(slowly, samples=samples).measurements


# --- which call is looked at ------------------------------------------------------------------------------------------


def test_the_sample_that_is_looked_at_comes_anywhere() -> None:
    found = [timing.turns_of_block({"a": 1, "b": 2}, 0, 3) for _ in range(400)]
    assert all(Counter(turns) == {("a", False): 3, ("b", False): 3, ("a", True): 1} for turns in found)
    assert {turns.index(("a", True)) for turns in found} == set(range(7))
    others = [turn for turn in found[0] if not turn[1]]
    assert [name for name, _ in others] == ["a", "b", "b", "a", "a", "b"]


def test_any_call_of_a_sample_may_be_looked_at() -> None:
    numbers = [timing.any_call(8) for _ in range(800)]
    assert set(numbers) == set(range(8))
    assert numbers.count(7) > 300  # every other time the last, whose work may not be done
    results = iter(range(100))
    assert timing.once(lambda: next(results), 8, 5)[1] == 5
    assert timing.once(lambda: next(results), 8)[1] == 15


def test_one_that_computes_only_the_last_call_of_a_sample() -> None:
    """It knows how many calls a sample has from those between two writes."""
    calls, version = 0, -1

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls, version
        if x._version != version:
            version, calls = x._version, 0
        calls += 1
        return reference(x, w) if calls == 1 or calls % 4 == 0 else torch.zeros_like(x)

    with pytest.raises(NotVerifiedError, match=r"has not returned what the same call returns alone|results changed|did not"):
        bench(candidate)


def test_one_whose_last_bits_differ_from_call_to_call_is_measured() -> None:
    """As those of sums are whose order depends on which thread is done first."""
    calls = 0

    def candidate(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        result = reference(x, w)
        return torch.nextafter(result, 2 * result) if calls % 2 else result

    assert len(bench(candidate).measurements) == 1
