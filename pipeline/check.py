"""Refuses a faulty schedule before anything starts: with the grid, the failing cell marked, and one sentence why."""

from __future__ import annotations

from typing import NoReturn

from pipeline.action import Action, Schedule

# What a (model stage, micro-batch) has behind it: the state that an action needs, and the state that it leaves.
_NOTHING, _FORWARD, _INPUT, _ALL = range(4)
_STEP = {"F": (_NOTHING, _FORWARD), "B": (_FORWARD, _ALL), "I": (_FORWARD, _INPUT), "W": (_INPUT, _ALL)}

_WINDOW = 12  # columns and rows shown on each side of a failing cell


def check(schedule: Schedule) -> None:
    """ValueError unless the schedule can run as it stands.

    Each (model stage, micro-batch) has one F, then one B or one I and later one W, all on the one rank that holds the
    stage; each rank holds `interleave` stages; no rank waits for ever.

    The last holds for buffered sends (a send returns at once) and for blocking ones (a send lasts until its receiver
    takes it), given the order of transfers that torch.distributed.pipelining uses: a send stands right behind the
    action that made its data, and puts its receive at that moment on the receiver's list, not in front of the action
    that will need it. Send and receive are then neighbours in one order of everything (feasible_order, with a transfer
    behind each action that makes one) and each rank's list is a part of that order, so the first transfer that is not
    yet done always has both its ends ready. Where that order exists, both kinds of send end; where it does not, neither
    does. With receives right in front of their users instead, blocking sends stop even 1f1b: that is not checked.
    """
    _check_shape(schedule)
    _check_actions(schedule)
    feasible_order(schedule)


def _check_shape(schedule: Schedule) -> None:
    for key, value in (("stages", schedule.stages), ("chunks", schedule.chunks), ("interleave", schedule.interleave)):
        if value < 1:
            raise ValueError(f"{key} must be at least 1, not {value}")
    rows = len(schedule.actions)
    if rows != schedule.stages:
        raise ValueError(
            f"schedule {schedule.name} has {rows} rows, one a rank, but stages={schedule.stages}: "
            f"set stages={rows} or write {schedule.stages} rows"
        )


def _check_actions(schedule: Schedule) -> None:
    """Each rank's own list: numbers in range, stages in one place, and F before B, F before I before W, each once."""
    chunks, num_stages = schedule.chunks, schedule.num_stages
    state = bytearray(num_stages * chunks)  # of each (stage, micro-batch): _NOTHING ... _ALL
    home = [-1] * num_stages  # the rank of each stage
    for rank, row in enumerate(schedule.actions):
        for column, (stage, kind, microbatch) in enumerate(row):
            if kind not in _STEP or not 0 <= stage < num_stages or not 0 <= microbatch < chunks:
                _refuse(schedule, _why_out_of_range(schedule, rank, column), (rank, column))
            if home[stage] != rank:
                if home[stage] >= 0:
                    why = f"runs on rank {rank}, but model stage {stage} is on rank {home[stage]}"
                    _refuse(schedule, f"{row[column]} {why}", (rank, column))
                home[stage] = rank
            cell = stage * chunks + microbatch
            needs, leaves = _STEP[kind]
            if state[cell] != needs:
                _refuse(schedule, _why_out_of_turn(schedule, rank, column, state[cell]), (rank, column))
            state[cell] = leaves
    if -1 in home:
        _refuse(schedule, f"no rank runs model stage {home.index(-1)} of {num_stages}")
    for rank in range(schedule.stages):
        if home.count(rank) != schedule.interleave:
            why = f"rank {rank} runs {home.count(rank)} model stages, but interleave={schedule.interleave}"
            _refuse(schedule, why, (rank, 0))
    if state.count(_ALL) < len(state):
        _refuse_missing(schedule, state, home)


def _why_out_of_range(schedule: Schedule, rank: int, column: int) -> str:
    action = schedule.actions[rank][column]
    if action.kind not in _STEP:
        return f"{action} is of no known kind: {', '.join(_STEP)}"
    if not 0 <= action.stage < schedule.num_stages:
        return f"{action} is of no model stage: they are 0 to {schedule.num_stages - 1} (stages x interleave)"
    return f"{action} is of no micro-batch: they are 0 to {schedule.chunks - 1} (chunks={schedule.chunks})"


def _why_out_of_turn(schedule: Schedule, rank: int, column: int, state: int) -> str:
    """Why an action finds its (stage, micro-batch) in another state than the one it needs."""
    stage, kind, microbatch = action = schedule.actions[rank][column]
    if kind == "F":
        return f"{action} runs a second time"
    if state == _NOTHING:
        return f"{action} runs before {stage}F{microbatch}"
    if kind == "W":
        if state == _FORWARD:
            return f"{action} runs before {stage}I{microbatch}"
        return f"{action} runs although the backward for the weights is already done"
    return f"{action} runs although the backward has already been run"


def _refuse_missing(schedule: Schedule, state: bytearray, home: list[int]) -> NoReturn:
    """Some (stage, micro-batch) is not finished: marks its last action, or the end of its rank's row."""
    cell = next(cell for cell, reached in enumerate(state) if reached != _ALL)
    stage, microbatch = divmod(cell, schedule.chunks)
    rank = home[stage]
    missing = {_NOTHING: "F", _FORWARD: "B", _INPUT: "W"}[state[cell]]
    own = [c for c, a in enumerate(schedule.actions[rank]) if (a.stage, a.microbatch) == (stage, microbatch)]
    why = f"{stage}{missing}{microbatch} is missing on rank {rank}"
    if missing == "B":
        why += f", and so are {stage}I{microbatch} and {stage}W{microbatch}"
    _refuse(schedule, why, (rank, own[-1] if own else len(schedule.actions[rank])))


def feasible_order(schedule: Schedule) -> list[int]:
    """One order in which all actions can run, as the rank of each next action: each rank takes its list in turn.

    ValueError when there is none: some ranks wait for each other for ever.
    """
    chunks, last_stage = schedule.chunks, schedule.num_stages - 1
    # Events are numbered 2 x (stage x chunks + micro-batch), the end of F, and one more, the end of B or I.
    done = bytearray(2 * schedule.num_stages * chunks)
    waiting: dict[int, int] = {}  # event -> the rank that cannot go on without it
    position = [0] * schedule.stages
    runnable = list(range(schedule.stages))
    order: list[int] = []
    while runnable:
        rank = runnable.pop()
        row = schedule.actions[rank]
        for column in range(position[rank], len(row)):
            stage, kind, microbatch = row[column]
            event = 2 * (stage * chunks + microbatch)
            if kind == "F":
                needs = event - 2 * chunks if stage > 0 else None
            elif kind == "W":
                needs = event = event + 1
            else:
                needs = event + 2 * chunks + 1 if stage < last_stage else event
                event += 1
            if needs is not None and not done[needs]:
                waiting[needs] = rank
                position[rank] = column
                break
            order.append(rank)
            done[event] = True
            if event in waiting:
                runnable.append(waiting.pop(event))
        else:
            position[rank] = len(row)
    if len(order) < sum(map(len, schedule.actions)):
        _refuse_deadlock(schedule, position)
    return order


def _refuse_deadlock(schedule: Schedule, position: list[int]) -> NoReturn:
    """Follows from one stuck rank what each waits for until a rank comes again: that circle is the reason."""
    rank = next(rank for rank, row in enumerate(schedule.actions) if position[rank] < len(row))
    path: list[int] = []
    links: list[str] = []
    while rank not in path:
        path.append(rank)
        action = schedule.actions[rank][position[rank]]
        wanted, other = _awaited(schedule, action)
        if wanted not in map(str, schedule.actions[other]):
            _refuse(schedule, f"{action} on rank {rank} waits for {wanted}, which no rank runs", (rank, position[rank]))
        behind = schedule.actions[other][position[other]]
        links.append(f"{action} on rank {rank} waits for {wanted}, which stands behind {behind} on rank {other}")
        rank = other
    start = path.index(rank)
    _refuse(schedule, "deadlock: " + "; ".join(links[start:]), *((rank, position[rank]) for rank in path[start:]))


def _awaited(schedule: Schedule, action: Action) -> tuple[str, int]:
    """What an action takes its input from, and the rank which runs that."""
    stage, kind, microbatch = action
    if kind == "F":
        return f"{stage - 1}F{microbatch}", schedule.rank_of[stage - 1]
    if kind == "W":
        return f"{stage}I{microbatch}", schedule.rank_of[stage]
    if stage == schedule.num_stages - 1:
        return f"{stage}F{microbatch}", schedule.rank_of[stage]
    rank = schedule.rank_of[stage + 1]
    whole = Action(stage + 1, "B", microbatch)
    return str(whole if whole in schedule.actions[rank] else whole._replace(kind="I")), rank


def _refuse(schedule: Schedule, why: str, *marks: tuple[int, int]) -> NoReturn:
    """ValueError: why, and the lists of actions around the marked cells, each a (rank, column)."""
    numbers = f"stages={schedule.stages} chunks={schedule.chunks} interleave={schedule.interleave}"
    raise ValueError(f"schedule {schedule.name} ({numbers}): {why}\n{_grid(schedule, marks)}")


def _grid(schedule: Schedule, marks: tuple[tuple[int, int], ...]) -> str:
    ranks, columns = [rank for rank, _ in marks] or [0], [column for _, column in marks] or [0]
    rows = range(max(0, min(ranks) - _WINDOW), min(schedule.stages, max(ranks) + _WINDOW + 1))
    longest = max(map(len, schedule.actions), default=0)
    first = max(0, min(columns) - _WINDOW)
    stop = min(longest, max(columns) + _WINDOW) + 1
    cells = {rank: [str(a) for a in schedule.actions[rank][first:stop]] for rank in rows}
    for rank, column in marks:
        if rank in cells:
            row = cells[rank]
            row[column - first :] = [f">{(row[column - first :] or ['?'])[0]}<", *row[column - first + 1 :]]
    width = max((len(cell) for row in cells.values() for cell in row), default=0)
    lines = [f"rank {rank}: " + " ".join(cell.rjust(width) for cell in row) for rank, row in cells.items()]
    if first > 0 or stop <= longest:
        lines.insert(0, f"(actions {first} to {min(stop, longest) - 1} of {longest} on each rank)")
    return "\n".join(lines)
