"""Measured steps as Chrome trace JSON, which Perfetto opens: a row a rank, arrows between stages. Imports no torch.

The format: "Trace Event Format", its JSON object form: `X` events with ts and dur in microseconds, `M` for names, `s`
and `f` for flows, which bind to the slice around their ts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.action import Action, Schedule
from pipeline.bubble import arrivals_of, ran_as, source_of
from pipeline.spans import REDUCE, RankStep, Timing

PID = 1  # of the run: one process in the viewer, its ranks are the rows
_TOUCH_S = 1e-7  # arrows begin and end this far inside a slice


def names(run: str, ranks: int) -> list[dict]:
    """The metadata events: the run's name and a row for each rank."""
    named = [_metadata("process_name", 0, name=run)]
    for rank in range(ranks):
        named += [
            _metadata("thread_name", rank, name=f"rank {rank}"),
            _metadata("thread_sort_index", rank, sort_index=rank),
        ]
    return named


def events(step: int, schedule: Schedule | None, ranks: list[RankStep], origin_s: float) -> list[dict]:
    """One step: every action, what it waited for, what it sent, and all else; times from `origin_s` on.

    schedule: what ran; None: actions were not seen, there are spans only.
    """
    found, arrivals = [], arrivals_of(ranks)
    for rank, measured in enumerate(ranks):
        for span in measured.spans:
            name = span.label if span.label == span.kind else f"{span.kind}: {span.label}"
            begun = span.start_s
            if span.kind == REDUCE and (begun := min(arrivals[span.label], span.end_s)) > span.start_s:
                found.append(_slice(f"wait for {span.label}", "wait", rank, span.start_s, begun, origin_s, step=step))
            found.append(_slice(name, span.kind, rank, begun, span.end_s, origin_s, step=step))
    if schedule is not None:
        ran = ran_as(schedule, ranks)
        for action, (rank, timing) in ran.items():
            found += _action(step, action, rank, timing, ran, origin_s)
    return sorted(found, key=lambda event: event["ts"])


def document(found: list[dict], other: dict[str, Any]) -> dict:
    """The whole file; `other`: what a reader should know about it."""
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": other}


def _action(
    step: int, action: Action, rank: int, timing: Timing, ran: dict[Action, tuple[int, Timing]], origin_s: float
) -> Iterator[dict]:
    """An action's slices and the arrow that comes to it. (`action` counts micro-batches over all flushes.)"""
    name = f"{action.kind} {action.microbatch}"
    about = {"stage": action.stage, "microbatch": action.microbatch, "step": step}
    source = source_of(action, ran)
    if timing.wait_s is not None and source is not None:
        sender, cause = ran[source]
        sent = min(max(timing.wait_s, cause.sent_s), timing.arrived_s)
        peer = about | {"from_rank": sender}
        if sent > timing.wait_s:
            yield _slice(f"wait {name}", "wait", rank, timing.wait_s, sent, origin_s, **peer)
        if timing.arrived_s > sent:
            yield _slice(f"receive {name}", "receive", rank, sent, timing.arrived_s, origin_s, **peer)
    yield _slice(name, action.kind, rank, timing.start_s, timing.end_s, origin_s, **about)
    if timing.sent_s is not None and timing.handed_s is not None:
        yield _slice(f"send {name}", "send", rank, timing.sent_s, timing.handed_s, origin_s, **about)
    if source is not None and ran[source][0] != rank:
        sender, cause = ran[source]
        arrow = {"name": "message", "cat": "message", "id": f"{step}/{action}", "pid": PID}
        yield arrow | {"ph": "s", "tid": sender, "ts": _us(max(cause.start_s, cause.end_s - _TOUCH_S) - origin_s)}
        yield arrow | {"ph": "f", "bp": "e", "tid": rank, "ts": _us(timing.start_s + _TOUCH_S - origin_s)}


def _slice(name: str, kind: str, rank: int, start_s: float, end_s: float, origin_s: float, **about: Any) -> dict:
    start, end = _us(start_s - origin_s), _us(end_s - origin_s)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": PID,
        "tid": rank,
        "ts": start,
        "dur": round(end - start, 3),
        "args": about,
    }


def _metadata(what: str, tid: int, **about: Any) -> dict:
    return {"name": what, "ph": "M", "pid": PID, "tid": tid, "args": about}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
