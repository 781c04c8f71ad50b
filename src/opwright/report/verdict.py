"""The verdict: what the records say, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from opwright.errors import plural
from opwright.records import Record
from opwright.report.cards import Card, collect_cards
from opwright.report.ratios import NO_DIFFERENCE, NO_INTERVAL, explain_shares, tell_counts, tell_speed

_VERDICTS = {"faster": "faster", "slower": "slower", "same": NO_DIFFERENCE, "": NO_INTERVAL}


def verdict(records: Sequence[Record]) -> str:
    """Says in one sentence whether the operators are right, and how fast.

    Raises:
        RecordError: there are no records.
    """
    cards = collect_cards(records)
    return verdict_of(cards[0]) if len(cards) == 1 else verdict_of_several(cards)


def verdict_of(card: Card) -> str:
    """Says in one sentence whether an operator is right, and how fast in each direction. A wrong one has no speed."""
    if card.fails:
        return f"{card.name} FAILS verify: {_first_failure(card)}"
    if card.refusal:
        return f"{card.name}: {_correctness(card)}; bench stopped: {card.refusal.rstrip('.')}."
    speeds = (_speed(card, direction) for direction in card.directions)
    parts = [_correctness(card), *speeds, _share(card), _against_base(card)]
    return f"{card.name}: {'; '.join(part for part in parts if part)}."


def verdict_of_several(cards: Sequence[Card]) -> str:
    """Says in one sentence how several operators fare."""
    is_one_machine = len({card.name for card in cards}) == len(cards)
    total = plural(len(cards), "operator" if is_one_machine else "result")
    failing = [card for card in cards if card.fails]
    refused = [card.name for card in cards if card.refusal and not card.fails]
    told = f"; {len(refused)} not measured ({', '.join(refused)})" if refused else ""
    if failing:
        names = ", ".join(f"{card.name} ({_count_failures(card)})" for card in failing)
        return f"{len(failing)} of {total} FAIL verify: {names}{told}."
    unverified = [card.name for card in cards if not card.is_verified]
    cases = sum(card.cases for card in cards)
    text = f"{total}: "
    if unverified:
        text += f"{len(unverified)} NOT verified ({', '.join(unverified)}), the others "
    text += f"right on {plural(cases, 'case')}" if cases else "verified"
    undecided = sum(card.undecided for card in cards)
    text += f", {undecided} undecided" if undecided else ""
    if len(unverified) == len(cards):
        text = f"{total}: NOT verified"
    text += told
    for direction in dict.fromkeys(direction for card in cards for direction in card.directions):
        verdicts = [s.verdict for card in cards for s in card.summaries_of(direction) if s.candidate == "eager"]
        if verdicts:
            counts = {word: verdicts.count(verdict) for verdict, word in _VERDICTS.items()}
            text += f"; {direction} against eager: {tell_counts(counts)}"
    slower = [
        f"{card.name} on {plural(len(card.base.slower), 'input')}" for card in cards if card.base and card.base.slower
    ]
    if slower:
        text += f"; slower than before: {', '.join(slower)}"
    return text + "."


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
    return f"{_count_failures(card)}, first: {first.title} on {first.input}: {message.rstrip('.:')}."


def _correctness(card: Card) -> str:
    if card.verify is None:
        untimed = card.refusal or card.bench is None
        return "verified" if card.is_verified else "no record of verify" if untimed else "NOT verified"
    if not card.is_verified:
        why = f"{plural(card.undecided, 'case')} undecided" if card.undecided else "no check ran"
        return f"NOT verified, {why}"
    return f"right on {plural(card.cases, 'case')}" + (f", {card.undecided} undecided" if card.undecided else "")


def _speed(card: Card, direction: str) -> str:
    """Says how fast a direction is: `forward 1.41x faster than eager (±2 %)`."""
    summaries = card.summaries_of(direction)
    if not summaries:
        return ""
    inputs = max(s.inputs for s in summaries)
    phrases = [
        tell_speed(s.ratio, s.visible, s.candidate)
        + (f" on {s.inputs} of {inputs} inputs" if s.inputs < inputs else "")
        for s in summaries
    ]
    return f"{direction} {' and '.join(filter(None, [', '.join(phrases[:-1]), phrases[-1]]))}"


def _against_base(card: Card) -> str:
    """Says on how many inputs it is faster or slower than its earlier version."""
    if card.base is None or not card.base.rows:
        return ""
    verdicts = [row.verdict for row in card.base.rows]
    counts = {word: verdicts.count(verdict) for verdict, word in _VERDICTS.items()}
    hint = f", only a hint: {card.base.reason}" if card.base.is_hint else ""
    return f"against {card.base.base}: {tell_counts(counts)} (of {plural(len(verdicts), 'input')}{hint})"


def _share(card: Card) -> str:
    """Says which share of the copy bandwidth inputs beyond the cache reach, and why where it is above 100 %."""
    shares = {direction: told for direction in card.directions if (told := card.tell_shares(direction))}
    if not shares:
        return ""
    told = [f"{share} ({direction})" if len(card.directions) > 1 else share for direction, share in shares.items()]
    fits = any(m.in_cache for m in card.measurements)
    text = f"at {' and '.join(told)} of this {'GPU' if card.on_gpu else 'machine'}'s copy bandwidth"
    text += " on inputs that do not fit the cache" if fits else ""
    reason = explain_shares(card.bench) if card.bench else ""
    return f"{text} ({reason})" if reason else text
