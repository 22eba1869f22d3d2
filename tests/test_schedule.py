"""The published schedules as a reader would draw them, their memory, what does not fit them, and the command."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pipeline.draw import text
from pipeline.schedule import SCHEDULES, Action, held_microbatches, make_schedule
from pipeline.simulate import simulate

ROOT = Path(__file__).resolve().parent.parent
UNITS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def assert_grid(schedule, expected):
    """expected: a line a rank, three characters a unit of time (F = I = W = 1, B = 2), kind and micro-batch of each
    action where it starts, a dot where a rank is idle. Small letters: the rank's second stage."""
    timeline = simulate(schedule, **UNITS)
    drawn = []
    for row, starts in zip(schedule.actions, timeline.start, strict=True):
        cells = [".  "] * timeline.makespan
        for (stage, kind, microbatch), start in zip(row, starts, strict=True):
            kind_shown = kind if stage < schedule.stages else kind.lower()
            cells[start] = f"{kind_shown}{microbatch} "
            if kind == "B":
                cells[start + 1] = "   "
        drawn.append("".join(cells).rstrip())
    assert drawn == textwrap.dedent(expected).strip("\n").splitlines()


def test_gpipe():
    assert_grid(
        make_schedule("gpipe", 3, 4),
        """
        F0 F1 F2 F3 .  .  .  .  .  .  B0    B1    B2    B3
        .  F0 F1 F2 F3 .  .  .  B0    B1    B2    B3    .  .
        .  .  F0 F1 F2 F3 B0    B1    B2    B3    .  .  .  .
        """,
    )


def test_1f1b():
    assert_grid(
        make_schedule("1f1b", 4, 8),
        """
        F0 F1 F2 F3 .  .  .  .  .  .  B0    F4 B1    F5 B2    F6 B3    F7 B4    .  B5    .  B6    .  B7
        .  F0 F1 F2 .  .  .  .  B0    F3 B1    F4 B2    F5 B3    F6 B4    F7 B5    .  B6    .  B7    .  .
        .  .  F0 F1 .  .  B0    F2 B1    F3 B2    F4 B3    F5 B4    F6 B5    F7 B6    .  B7    .  .  .  .
        .  .  .  F0 B0    F1 B1    F2 B2    F3 B3    F4 B4    F5 B5    F6 B6    F7 B7    .  .  .  .  .  .
        """,
    )


def test_1f1b_with_fewer_chunks_than_stages():
    assert_grid(
        make_schedule("1f1b", 4, 2),
        """
        F0 F1 .  .  .  .  .  .  .  .  B0    .  B1
        .  F0 F1 .  .  .  .  .  B0    .  B1    .  .
        .  .  F0 F1 .  .  B0    .  B1    .  .  .  .
        .  .  .  F0 B0    F1 B1    .  .  .  .  .  .
        """,
    )


def test_interleaved_1f1b():
    # the rounds are micro-batches 0, 1 and 2, 3
    assert_grid(
        make_schedule("interleaved_1f1b", 2, 4),
        """
        F0 F1 f0 f1 F2 .  b0    F3 b1    f2 B0    f3 B1    .  b2    .  b3    B2    B3
        .  F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3    .  .
        """,
    )


def test_looped_bfs():
    assert_grid(
        make_schedule("looped_bfs", 3, 3),
        """
        F0 F1 F2 f0 f1 f2 .  .  .  .  .  .  b2    b1    b0    B2    B1    B0
        .  F0 F1 F2 f0 f1 f2 .  .  .  b2    b1    b0    B2    B1    B0    .  .
        .  .  F0 F1 F2 f0 f1 f2 b2    b1    b0    B2    B1    B0    .  .  .  .
        """,
    )


def test_zb_h1():
    assert_grid(
        make_schedule("zb_h1", 4, 8),
        """
        F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
        .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
        .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
        .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
        """,
    )


def test_zb_h2():
    assert_grid(
        make_schedule("zb_h2", 4, 8),
        """
        F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 .  .  .
        .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 .  .
        .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 .
        .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7
        """,
    )


def test_zb_v():
    assert_grid(
        make_schedule("zb_v", 3, 5),
        """
        F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4 .  .
        .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4 .
        .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 w4 W3 W4
        """,
    )


def test_dualpipe_v():
    assert_grid(
        make_schedule("dualpipe_v", 2, 5),
        """
        F0 F1 F2 f0 i0 w0 f1 F3 b1    f2 B0    F4 b2    f3 B1    b3    f4 .  B2    b4    I3 W3 I4 W4
        .  F0 f0 F1 f1 F2 b0    f2 B0    F3 b1    f3 B1    F4 b2    f4 B2    b3    B3    i4 I4 w4 W4
        """,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_in_each_docstring_is_what_is_drawn(name):
    paragraph = re.search(r"    (stages=.*):\n((?: {8}.*\n)+)", SCHEDULES[name].__doc__)
    numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", paragraph[1])}
    schedule = make_schedule(name, **numbers)
    drawn = text(schedule, simulate(schedule, **UNITS)).splitlines()[1:]
    assert [line.strip() for line in paragraph[2].splitlines()] == [line.split(": ")[1] for line in drawn]


# Memory: forwards whose activations a rank holds at the peak, as the papers have them.


@pytest.mark.parametrize("stages", range(1, 9))
def test_held_microbatches(stages):
    chunks = 4 * stages
    ranks = range(stages)

    def held(name, *args):
        return held_microbatches(make_schedule(name, stages, chunks, *args))

    assert held("gpipe") == [chunks] * stages
    assert held("1f1b") == [stages - rank for rank in ranks]
    assert held("zb_h1") == [stages] * stages  # what 1f1b holds on its first rank
    assert held("zb_h2") == [2 * stages - 1] * stages
    assert held("looped_bfs", 3) == [3 * chunks] * stages
    assert held("interleaved_1f1b", 3) == [2 * stages + 2 * (stages - 1 - rank) + 1 for rank in ranks]
    assert held("zb_v") == [2 * stages] * stages  # halves of a rank: as 1f1b's first rank
    assert held("dualpipe_v") == [2 * stages + 1] * stages


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 9))
def test_memory_bounds_hold_for_few_chunks_too(stages, chunks):
    first_of_1f1b = held_microbatches(make_schedule("1f1b", stages, chunks))[0]
    assert max(held_microbatches(make_schedule("zb_h1", stages, chunks))) <= first_of_1f1b
    assert max(held_microbatches(make_schedule("zb_h2", stages, chunks))) <= 2 * stages - 1
    assert max(held_microbatches(make_schedule("zb_v", stages, chunks))) <= 2 * stages


# What a schedule says about itself.


def test_properties():
    schedule = make_schedule("zb_v", 3, 6)
    assert (schedule.stages, schedule.chunks, schedule.interleave, schedule.num_stages) == (3, 6, 2, 6)
    assert schedule.rank_of == [0, 1, 2, 2, 1, 0]
    assert make_schedule("interleaved_1f1b", 3, 6).rank_of == [0, 1, 2, 0, 1, 2]
    splits = {name for name in SCHEDULES if make_schedule(name, 2, 4).splits_backward}
    assert splits == {"zb_h1", "zb_h2", "zb_v", "dualpipe_v"}
    assert {name for name in SCHEDULES if make_schedule(name, 2, 4).reverses_backward} == {"looped_bfs"}
    assert not make_schedule("looped_bfs", 2, 1).reverses_backward


def test_action_text():
    action = Action.parse("12W345")
    assert action == Action(12, "W", 345) and str(action) == "12W345"
    for wrong in ("", "F0", "2F", "2X0", "2F0 ", "-1F0", "2f0"):
        with pytest.raises(ValueError, match="is not an action"):
            Action.parse(wrong)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("2f2b", 2, 4), "unknown schedule '2f2b': known are gpipe, 1f1b, .*dualpipe_v"),
        (("1f1b", 0, 4), "stages must be at least 1, not 0"),
        (("1f1b", 2, 0), "chunks must be at least 1, not 0"),
        (("zb_v", 2, 4, 0), "interleave must be at least 1, not 0"),
        (("gpipe", 2, 4, 2), "gpipe has 1 model stage a rank, not interleave=2: set interleave=1, .* looped_bfs"),
        (("1f1b", 2, 4, 3), "1f1b has 1 model stage a rank, not interleave=3: .* interleaved_1f1b"),
        (("zb_h1", 2, 4, 2), "zb_h1 has 1 model stage a rank, not interleave=2"),
        (("zb_v", 2, 4, 1), "zb_v has 2 model stages a rank, not interleave=1: set interleave=2"),
        (("dualpipe_v", 2, 4, 3), "dualpipe_v has 2 model stages a rank, not interleave=3"),
        (("dualpipe_v", 4, 7), "dualpipe_v needs at least 2 x stages = 8 chunks, not 7: set chunks=8"),
        (("interleaved_1f1b", 4, 9), "chunks=9 with stages=4 does not divide into 2; set chunks=8 or 10"),
        (("interleaved_1f1b", 4, 13), "does not divide into 3; set chunks=12 or 15"),
    ],
)
def test_misfits_are_refused_with_the_numbers_and_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message) as refused:
        make_schedule(*arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("stages, chunks", [(4, 9), (4, 13), (7, 22), (8, 65)])
def test_what_a_refusal_of_interleaved_1f1b_names_is_accepted(stages, chunks):
    with pytest.raises(ValueError) as refused:
        make_schedule("interleaved_1f1b", stages, chunks)
    for named in re.search(r"set chunks=(\d+) or (\d+)", str(refused.value)).groups():
        make_schedule("interleaved_1f1b", stages, int(named))


# The command.


def command(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "pipeline.schedule", *arguments], cwd=ROOT, capture_output=True, text=True, **kwargs
    )


def test_the_command_draws_a_schedule():
    done = command("interleaved_1f1b", "stages=2", "chunks=2", "interleave=2")
    assert done.returncode == 0 and done.stderr == ""
    expected = """
        # interleaved_1f1b stages=2 chunks=2 interleave=2
        # time  0                   5                   10                  15
        rank 0: 0F0 0F1 2F0 2F1 .   .   2B0     .   2B1     0B0     0B1
        rank 1: .   1F0 1F1 3F0 3B0     3F1 3B1     1B0     1B1     .   .
        # bubble_fraction  0.2000  idle / makespan (15), mean over ranks
        # bubble_in_span   0.1000  idle between a rank's own first and last action / that span
        # bubble_overhead  0.2500  idle / work
        # held_microbatches 4 3  at the peak of each rank (of 1/2 of a rank's layers each)
    """
    assert done.stdout == textwrap.dedent(expected).lstrip("\n")


def test_chunks_are_four_times_the_stages_where_they_are_not_given():
    assert command("1f1b", "stages=3").stdout == command("1f1b", "chunks=12", "stages=3").stdout


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_command_lists_the_schedules(arguments):
    done = command(*arguments)
    assert done.returncode == 0
    for name in SCHEDULES:
        assert re.search(rf"^  {name} +\S.*\.$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1b",), "stages is missing"),
        (("1f1b", "stages=two"), "'stages=two' is not understood"),
        (("1f1b", "stages=4", "depth=3"), "'depth=3' is not understood"),
        (("1f1b", "stages=4", "--svg", "x"), "unrecognized arguments: --svg"),
        (("1f2b", "stages=4"), "unknown schedule '1f2b': known are gpipe"),
        (("zb_v", "stages=4", "interleave=3"), "set interleave=2"),
        (("1f1b", "stages=0"), "stages must be at least 1"),
        (("1f1b", "stages=2", "--png", "no/such/folder/a.png"), "No such file or directory"),
        (("1f1b", "stages=2", "chunks=9000", "--png", "a.png"), "draw fewer chunks"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_colours_are_for_terminals_only():
    schedule = make_schedule("zb_v", 2, 3)
    timeline = simulate(schedule, **UNITS)
    painted = text(schedule, timeline, colours=True)
    assert "\033[" in painted
    plain = [line.rstrip() for line in re.sub(r"\033\[[0-9;]*m", "", painted).splitlines()]
    assert plain == text(schedule, timeline).splitlines()
    assert "\033[" not in command("zb_v", "stages=2").stdout

    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-m", "pipeline.schedule", "zb_v", "stages=2", "chunks=3"], cwd=ROOT, stdout=theirs)
    os.close(theirs)
    assert "\033[" in os.read(ours, 100_000).decode()
    os.close(ours)


def test_the_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    done = command("dualpipe_v", "stages=2", "chunks=4", "--png", str(tmp_path / "drawn.png"))
    assert done.returncode == 0
    with image.open(tmp_path / "drawn.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(100_000)}
        assert picture.format == "PNG" and picture.width > 25 * 60
    assert {(86, 139, 219), (92, 171, 108), (84, 178, 178), (228, 166, 75)} <= colours  # F, B, I, W


def test_it_answers_at_once_and_without_torch():
    times = []
    for _ in range(3):
        began = time.perf_counter()
        command("1f1b", "stages=4", "chunks=8")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5
    heavy = "{'torch', 'numpy', 'PIL', 'omegaconf'}"
    code = f"import sys, pipeline, pipeline.draw, pipeline.simulate; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
