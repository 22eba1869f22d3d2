"""Faulty schedules are refused, with the failing cell marked; a user's own schedule is loaded, or refused clearly."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from random_schedules import random_schedule

from pipeline.schedule import SCHEDULES, Action, Schedule, check, feasible_order, make_schedule

ROOT = Path(__file__).resolve().parent.parent


def schedule_of(*rows, stages=None, chunks=2, interleave=1):
    actions = [[Action.parse(cell) for cell in row.split()] for row in rows]
    return Schedule("mine", stages or len(rows), chunks, interleave, actions)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_good_schedule_passes():
    check(schedule_of(*GOOD))
    check(schedule_of("0F0 0I0 0W0 0F1 0B1", chunks=2))
    check(schedule_of("0F0 1F0 1B0 0B0", chunks=1, interleave=2))


@pytest.mark.parametrize(
    "rows, numbers, why, marked",
    [
        (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), {}, "1B0 runs before 1F0", ">1B0<"),
        (("0F0 0F1 0B0 0B1 0F0", GOOD[1]), {}, "0F0 runs a second time", ">0F0<"),
        (("0F0 0F1 0B0 0B0", GOOD[1]), {}, "0B0 runs although the backward has already been run", ">0B0<"),
        (("0F0 0F1 0B0 0I0 0B1", GOOD[1]), {}, "0I0 runs although the backward has already been run", ">0I0<"),
        (("0F0 0F1 0W0 0I0 0B1", GOOD[1]), {}, "0W0 runs before 0I0", ">0W0<"),
        (("0F0 0F1 0B0 0W0 0B1", GOOD[1]), {}, "0W0 runs although the backward for the weights is", ">0W0<"),
        (("0W0 0F0 0F1 0B0 0B1", GOOD[1]), {}, "0W0 runs before 0F0", ">0W0<"),
        (("0F0 0F1 0I0 0B1", GOOD[1]), {}, "0W0 is missing on rank 0", ">0I0<"),
        (("0F0 0F1 0B0", GOOD[1]), {}, "0B1 is missing on rank 0, and so are 0I1 and 0W1", ">0F1<"),
        (("0F0 0B0", GOOD[1]), {}, "0F1 is missing on rank 0", "0B0 >?<"),
        (("0F0 0F1 0B0 0B1 0F2", GOOD[1]), {}, "0F2 is of no micro-batch: they are 0 to 1 (chunks=2)", ">0F2<"),
        (("0F0 0F1 0B0 0B1", GOOD[1] + " 2F0"), {}, "2F0 is of no model stage: they are 0 to 1", ">2F0<"),
        (("0F0 0F1 0B0", GOOD[1] + " 0B1"), {}, "0B1 runs on rank 1, but model stage 0 is on rank 0", ">0B1<"),
        (("0F0 0F1 0B0 0B1", ""), {}, "no rank runs model stage 1 of 2", ""),
        (("0F0 1F0 1B0 0B0", ""), {"chunks": 1}, "rank 0 runs 2 model stages, but interleave=1", ">0F0<"),
        (GOOD, {"stages": 3}, "mine has 2 rows, one a rank, but stages=3: set stages=2 or write 3 rows", ""),
        (GOOD, {"chunks": 0}, "chunks must be at least 1", ""),
    ],
)
def test_faults_are_named_and_marked(rows, numbers, why, marked):
    with pytest.raises(ValueError) as refused:
        check(schedule_of(*rows, **numbers))
    message = str(refused.value)
    assert why in message.splitlines()[0]
    assert marked in message
    assert message.count(">") == (1 if marked else 0)


def test_an_action_of_no_known_kind():
    with pytest.raises(ValueError, match="0X0 is of no known kind: F, B, I, W"):
        check(Schedule("mine", 1, 1, 1, [[Action(0, "F", 0), Action(0, "X", 0)]]))


def test_a_deadlock_is_shown_as_the_circle_of_who_waits_for_whom():
    # rank 0 wants the backward of 0 before it sends 1; rank 1 wants 1 before it runs the backward of 0
    with pytest.raises(ValueError) as refused:
        check(schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    why, *grid = str(refused.value).splitlines()
    assert why == (
        "schedule mine (stages=2 chunks=2 interleave=1): deadlock: "
        "0B0 on rank 0 waits for 1B0, which stands behind 1F1 on rank 1; "
        "1F1 on rank 1 waits for 0F1, which stands behind 0B0 on rank 0"
    )
    assert grid == [
        "rank 0:   0F0 >0B0<   0F1   0B1",
        "rank 1:   1F0 >1F1<   1B0   1B1",
    ]


def test_a_deadlock_inside_one_rank():
    with pytest.raises(ValueError, match="deadlock: 1F0 on rank 0 waits for 0F0, which stands behind 1F0 on rank 0"):
        check(schedule_of("1F0 0F0 1B0 0B0", chunks=1, interleave=2))


def test_of_a_large_schedule_the_part_around_the_fault_is_shown():
    schedule = make_schedule("1f1b", 40, 500)
    rows = [list(row) for row in schedule.actions]
    at = rows[20].index(Action(20, "B", 300))
    del rows[20][at]
    with pytest.raises(ValueError) as refused:
        check(Schedule("mine", 40, 500, 1, rows))
    lines = str(refused.value).splitlines()
    assert "20B300 is missing on rank 20" in lines[0]
    assert lines[1].endswith(" of 1000 on each rank)")
    assert len(lines) == 27 and max(map(len, lines[1:])) < 300
    assert sum(">20F300<" in line for line in lines) == 1


# Random faults: the check against an executor that shares nothing with it.


def runs_by_brute_force(schedule):
    """Whether everything that must run runs, once and in order, when ranks are tried again and again in turn."""
    p, m, v = schedule.stages, schedule.chunks, schedule.interleave
    every = [(action, rank) for rank, row in enumerate(schedule.actions) for action in row]
    for stage in range(p * v):
        if len({rank for action, rank in every if action.stage == stage}) != 1:
            return False
        for microbatch in range(m):
            kinds = sorted(a.kind for a, _ in every if (a.stage, a.microbatch) == (stage, microbatch))
            if kinds not in (["B", "F"], ["F", "I", "W"]):
                return False
    if any(action.stage >= p * v or action.microbatch >= m for action, _ in every):
        return False
    if any(len({action.stage for action in row}) != v for row in schedule.actions):
        return False
    left = [list(row) for row in schedule.actions]
    ran = set()
    for _ in range(len(every)):
        for row in left:
            if row:
                stage, kind, microbatch = row[0]
                needs = {"F": [], "W": [(stage, "I")]}.get(kind, [(stage, "F")])
                if kind == "F" and stage > 0:
                    needs = [(stage - 1, "F")]
                if kind in "BI" and stage < p * v - 1:
                    needs = [(stage, "F"), (stage + 1, "BI")]
                if all(any((s, k, microbatch) in ran for k in kinds) for s, kinds in needs):
                    ran.add(row.pop(0))
    return not any(left)


def mutate(generator, rows):
    """Swaps, drops, doubles, moves, changes or turns around something."""
    rank = generator.choice([rank for rank, row in enumerate(rows) if row])
    row, other = rows[rank], generator.choice(rows)
    at = generator.randrange(len(row))
    match generator.randrange(7):
        case 0:
            near = min(len(row) - 1, at + generator.randint(1, 3))
            row[at], row[near] = row[near], row[at]
        case 1:
            del row[at]
        case 2:
            row.insert(generator.randrange(len(row) + 1), row[at])
        case 3:
            other.insert(generator.randrange(len(other) + 1), row.pop(at))
        case 4:
            row[at] = row[at]._replace(kind=generator.choice("FBIW"))
        case 5:
            row[at] = row[at]._replace(microbatch=max(0, row[at].microbatch + generator.choice([-1, 1])))
        case 6:
            stop = at + generator.randint(2, 4)
            row[at:stop] = row[at:stop][::-1]


def published(generator):
    name = generator.choice(list(SCHEDULES))
    stages = generator.randint(1, 4)
    chunks = generator.choice([stages, 2 * stages])
    return make_schedule(name, stages, 2 * stages if name == "dualpipe_v" else chunks)


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_are_refused_and_what_passes_runs(seed):
    generator = random.Random(seed)
    outcomes = []
    for _ in range(100):
        good = published(generator) if generator.random() < 0.5 else random_schedule(generator)
        assert runs_by_brute_force(good)
        rows = [list(row) for row in good.actions]
        for _ in range(generator.randint(1, 2)):
            if any(rows):
                mutate(generator, rows)
        schedule = Schedule("mutated", good.stages, good.chunks, good.interleave, rows)
        try:
            check(schedule)
        except ValueError as refused:
            outcomes.append(False)
            message = str(refused)
            assert "rank 0:" in message and (">" in message or "no rank runs" in message), message
        else:
            outcomes.append(True)
            assert len(feasible_order(schedule)) == sum(map(len, rows))
        assert outcomes[-1] == runs_by_brute_force(schedule), (schedule, outcomes[-1])
    assert 5 < sum(outcomes) < 95  # both kinds were met


# A user's own.

OWN = '''
from pipeline.schedule import Action


def one_by_one(stages, chunks, interleave=1):
    """One micro-batch at a time goes down and back: no overlap at all."""
    return [
        [Action(rank, kind, m) for m in range(chunks) for kind in "FB"]
        for rank in range(stages)
    ]


def as_text(stages, chunks, interleave=2):
    return [["0F0", "1F0", ".", None, "1I0", "0B0", "1W0"]]


def no_default(stages, chunks, interleave):
    return one_by_one(stages, chunks)


def picky(stages, chunks, interleave=1):
    raise ValueError(f"picky wants even chunks, not {chunks}")


def broken(stages, chunks, interleave=1):
    return 1 / 0


def no_rows(stages, chunks, interleave=1):
    return "0F0 0B0"


def wrong_cell(stages, chunks, interleave=1):
    return [["0F0", "0Q0"]]


def stops(stages, chunks, interleave=1):
    return [[Action(0, "B", 0), Action(0, "F", 0)]]


def empty(stages, chunks, interleave=1):
    return [[]]
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_a_function_of_ones_own(own):
    schedule = make_schedule(f"{own}:one_by_one", 3, 2)
    assert schedule.interleave == 1 and schedule.rank_of == [0, 1, 2]
    assert [str(action) for action in schedule.actions[2]] == ["2F0", "2B0", "2F1", "2B1"]
    assert make_schedule(f"{own}:no_default", 3, 2).actions == schedule.actions
    text = make_schedule(f"{own}:as_text", 1, 1)
    assert text.interleave == 2 and [str(action) for action in text.actions[0]] == ["0F0", "1F0", "1I0", "0B0", "1W0"]


@pytest.mark.parametrize(
    "function, numbers, message",
    [
        ("nothing", (1, 1), "mine.py has no function 'nothing': it has as_text, broken, empty, no_default, .*"),
        ("picky", (1, 1), "^picky wants even chunks, not 1$"),
        ("broken", (1, 1), r"mine.py: broken\(1, 1, 1\) raises ZeroDivisionError: division by zero"),
        ("no_rows", (1, 1), "no_rows gives str, not a list with a list of actions for each rank"),
        ("wrong_cell", (1, 1), "wrong_cell, rank 0: '0Q0' is not an action"),
        ("stops", (1, 1), "0B0 runs before 0F0"),
        ("empty", (1, 1), "has no action at all"),
        ("as_text", (3, 1), "has 1 rows, one a rank, but stages=3"),
        ("as_text", (1, 4), "runs micro-batches 0 to 0, but chunks=4: set chunks=1"),
        ("as_text", (1, 1, 3), "runs 2 model stages, but stages=1 and interleave=3"),
    ],
)
def test_a_faulty_function_of_ones_own(own, function, numbers, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(f"{own}:{function}", *numbers)


def test_a_file_that_is_not_there_or_does_not_load(tmp_path):
    with pytest.raises(ValueError, match="there is no file no/such.py in"):
        make_schedule("no/such.py:function", 2, 2)
    with pytest.raises(ValueError, match="there is no schedule file no/such.txt in"):
        make_schedule("no/such.txt", 2, 2)
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="bad.py does not load: ModuleNotFoundError: No module named"):
        make_schedule(f"{tmp_path}/bad.py:f", 2, 2)


def test_a_grid_of_ones_own(tmp_path):
    grid = tmp_path / "grid.txt"
    grid.write_text("# two ranks\n0F0 0F1 .   .   0B0 0B1\n\n  .   1F0 1B0 1F1 1B1\n")
    schedule = make_schedule(str(grid), 2, 2)
    assert schedule.actions == schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1").actions


@pytest.mark.parametrize(
    "content, numbers, message",
    [
        ("0F0 0B0\n", (2, 1), "has 1 rows, one a rank, but stages=2"),
        ("0F0 0B0\n", (1, 2), "runs micro-batches 0 to 0, but chunks=2: set chunks=1"),
        ("0F0 0B0\n1F0 1B0\n", (2, 1, 2), "runs 2 model stages, but stages=2 and interleave=2"),
        ("0F0 1F0 1B0 0B0\n2F0 2B0\n", (2, 1), "runs 3 model stages, but stages=2"),
        ("0F0 B0\n", (1, 1), "line 1: 'B0' is not an action: write stage, kind"),
        ("rank 1: 0F0 0B0\n", (1, 1), "line 1: rank 1 stands where rank 0 is expected"),
        ("0B0 0F0\n", (1, 1), ">0B0<"),
        ("# nothing\n", (1, 1), "has 0 rows"),
    ],
)
def test_a_faulty_grid_of_ones_own(tmp_path, content, numbers, message):
    (tmp_path / "grid.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        make_schedule(str(tmp_path / "grid.txt"), *numbers)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_command_prints_is_a_grid_that_can_be_run(tmp_path, name):
    printed = subprocess.run(
        [sys.executable, "-m", "pipeline.schedule", name, "stages=3", "chunks=6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    (tmp_path / "grid.txt").write_text(printed.stdout)
    again = make_schedule(str(tmp_path / "grid.txt"), 3, 6)
    expected = make_schedule(name, 3, 6)
    assert again.actions == expected.actions and again.interleave == expected.interleave


def test_the_command_shows_the_grid_of_a_faulty_schedule(tmp_path):
    (tmp_path / "grid.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    command = [sys.executable, "-m", "pipeline.schedule", str(tmp_path / "grid.txt"), "stages=2", "chunks=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "deadlock" in done.stderr and "rank 1:   1F0 >1F1<   1B0   1B1" in done.stderr
