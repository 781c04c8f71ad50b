"""The verdict: what the records say, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from opwright.records import Record
from opwright.report.cards import Card, collect_cards
from opwright.report.quantities import percent, plural, round_to

_TITLES = {"compile": "torch.compile"}


def verdict(records: Sequence[Record]) -> str:
    """Says in one sentence whether the operators are right, and how fast.

    Raises:
        RecordError: there are no records.
    """
    cards = collect_cards(records)
    return judge(cards[0]) if len(cards) == 1 else judge_all(cards)


def judge(card: Card) -> str:
    """Says in one sentence whether an operator is right, and how fast. A wrong one has no speed."""
    if card.fails:
        return f"{card.name} FAILS verify: {_first_failure(card)}"
    if card.refusal:
        return f"{card.name}: {_correctness(card)}, REFUSED by bench: {card.refusal}."
    parts = [part for part in (_correctness(card), _speed(card), _share(card)) if part]
    return f"{card.name}: {', '.join(parts)}."


def judge_all(cards: Sequence[Card]) -> str:
    """Says in one sentence how several operators fare."""
    is_one_machine = len({card.name for card in cards}) == len(cards)
    total = plural(len(cards), "operator" if is_one_machine else "result")
    failing = [card for card in cards if card.fails]
    if failing:
        names = ", ".join(f"{card.name} ({_count_failures(card)})" for card in failing)
        return f"{len(failing)} of {total} FAIL verify: {names}."
    refused = [card.name for card in cards if card.refusal]
    unverified = [card.name for card in cards if not card.is_verified and not card.refusal]
    cases = sum(card.cases for card in cards)
    text = f"{total}: "
    if unverified:
        text += f"{len(unverified)} NOT verified ({', '.join(unverified)}), the others "
    text += f"right on {plural(cases, 'case')}" if cases else "verified"
    undecided = sum(card.undecided for card in cards)
    text += f", {undecided} undecided" if undecided else ""
    if len(unverified) == len(cards):
        text = f"{total}: NOT verified"
    if refused:
        text += f", {len(refused)} REFUSED by bench ({', '.join(refused)})"
    speedups = [s for card in cards if (s := card.median_speedup_over("eager")) is not None]
    if speedups:
        factors = " to ".join(dict.fromkeys([_factor(min(speedups)), _factor(max(speedups))]))
        text += f", {factors} the speed of eager (medians per operator)"
    return text + "."


def compare_speed(speedup: float, other: str) -> str:
    """Writes a speed-up in words: `6.4x faster than eager`."""
    title = _TITLES.get(other, other)
    if round(speedup, 2) == 1:
        return f"as fast as {title}"
    if speedup > 1:
        return f"{_factor(speedup)} faster than {title}"
    return f"{_factor(1 / speedup)} slower than {title}"


def _factor(ratio: float) -> str:
    return f"{round_to(ratio, 3 if 0.95 <= ratio < 1.1 else 2)}x"


def _count_failures(card: Card) -> str:
    assert card.verify is not None
    count = len(card.verify.failures)
    if count:
        return plural(count, "failure")
    return f"{plural(sum(c.outcome == 'failed' for c in card.verify.checks), 'check')} failed"


def _first_failure(card: Card) -> str:
    assert card.verify is not None
    if not card.verify.failures:
        return f"{_count_failures(card)}."
    first = card.verify.failures[0]
    message = next((line.strip() for line in first.message.splitlines() if line.strip()), "no message")
    return f"{_count_failures(card)}, first: {first.title} on {first.case}: {message.rstrip('.:')}."


def _correctness(card: Card) -> str:
    if card.verify is None:
        untimed = card.refusal or card.bench is None
        return "verified" if card.is_verified else "no record of verify" if untimed else "NOT verified"
    if not card.is_verified:
        why = f"{plural(card.undecided, 'case')} undecided" if card.undecided else "no check ran"
        return f"NOT verified, {why}"
    return f"right on {plural(card.cases, 'case')}" + (f", {card.undecided} undecided" if card.undecided else "")


def _speed(card: Card) -> str:
    inputs = len(card.measurements)
    rivals = [name for name in card.baselines if name in ("eager", "compile", card.fastest_peer)]
    phrases = []
    for name in rivals:
        ratios = card.speedups_over(name)
        if ratios:
            fewer = f" on {plural(len(ratios), 'input')}" if len(ratios) != inputs else ""
            phrases.append(compare_speed(median(ratios), name) + fewer)
    if not phrases:
        return ""
    listed = " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)
    return f"{listed} (median over {plural(inputs, 'input')})" if inputs > 1 else f"{listed} (1 input)"


def _share(card: Card) -> str:
    outside, inside = card.roof_shares()
    if not outside:
        return ""
    text = f"at {percent(median(outside), 2)} of this {'GPU' if card.on_gpu else 'machine'}'s copy bandwidth"
    return text + (f" on the {len(outside)} that do not fit the cache" if inside else "")
