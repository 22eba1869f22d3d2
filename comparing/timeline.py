"""RUN/timeline.json (Chrome trace events, one action each) as the actions of its last whole step."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

KINDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weight"}
_NAME = re.compile(r"([FBIW]) ?(\d+)")


@dataclass(frozen=True)
class Bar:
    """One action of one rank; times in seconds from the step's first action."""

    rank: int
    kind: str  # F, B, I or W
    stage: int
    microbatch: int
    start: float
    seconds: float


def read_timeline(run_dir: Path) -> list[Bar]:
    """The actions of the last step that all its ranks recorded, by rank and start; empty where there is no timeline.

    ValueError: there is one, and it is no trace.
    """
    path = run_dir / "timeline.json"
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no trace ({type(error).__name__})") from error
    steps: dict[tuple, list[Bar]] = {}
    for event in events if isinstance(events, list) else []:
        match = (
            _NAME.fullmatch(str(event.get("name", ""))) if isinstance(event, dict) and event.get("ph") == "X" else None
        )
        if match is None:
            continue
        try:
            arguments = event.get("args", {})
            start, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
            bar = Bar(int(event["tid"]), match[1], int(arguments.get("stage", 0)), int(match[2]), start, seconds)
            steps.setdefault((event.get("pid", 0), arguments.get("step", 0)), []).append(bar)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):  # no action as train.py writes it
            continue
    if not steps:
        return []
    first_process = min((key[0] for key in steps), key=str)  # what was measured; a prediction beside it comes after
    own = {key[1]: bars for key, bars in steps.items() if key[0] == first_process}
    most = max(map(len, own.values()))
    last = max((step for step, bars in own.items() if len(bars) == most), key=lambda step: (str(type(step)), step))
    begin = min(bar.start for bar in own[last])
    bars = [Bar(b.rank, b.kind, b.stage, b.microbatch, b.start - begin, b.seconds) for b in own[last]]
    return sorted(bars, key=lambda bar: (bar.rank, bar.start))


def describe(bars: list[Bar]) -> dict[str, float]:
    """Figures of a step: its length, each rank's busy part, and the mean length of each kind of action, seconds."""
    if not bars:
        return {}
    length = max(bar.start + bar.seconds for bar in bars)
    found = {"makespan_s": length}
    for rank in sorted({bar.rank for bar in bars}):
        busy = sum(bar.seconds for bar in bars if bar.rank == rank)
        found[f"rank {rank} busy"] = busy / length if length else 0.0
    counts = Counter(bar.kind for bar in bars)
    for kind in KINDS:
        if counts[kind]:
            found[f"{kind} mean_s"] = sum(bar.seconds for bar in bars if bar.kind == kind) / counts[kind]
            found[f"{kind} count"] = counts[kind]
    return found
