"""The published schedules, each a pure function (stages, chunks, interleave) -> the list of actions of each rank.

stages: pipeline ranks, p. chunks: micro-batches, m. interleave: model stages a rank, v; its default is what null means
in the config. Each function raises ValueError, with the numbers and the remedy, for those that do not fit it.

A cell of the grids is stage, kind and micro-batch, all counted from 0: `2F0` is stage 2, forward, micro-batch 0.
F forward; B the whole backward, two columns; I the backward for the input and W the backward for the weights, one
column each; `.` idle. A row is a rank, a column the time of one F. (A test draws each and compares.)

`bubble` is bubble_fraction = mean over ranks of idle / makespan where all stages take F = I = W = B/2 and transfers no
time, for m >= p; `held` is the peak number of forwards, of one model stage each, whose activations a rank holds.
"""

from __future__ import annotations

from itertools import chain

from conf.words import count
from pipeline.action import Action


def gpipe(stages: int, chunks: int, interleave: int = 1) -> list[list[Action]]:
    """Fill and drain: all forwards, then all backwards. GPipe, arXiv 1811.06965.

    bubble (p-1)/(m+p-1); held m. Any number of chunks.

    stages=3 chunks=4:
        0F0 0F1 0F2 0F3 .   .   .   .   .   .   0B0     0B1     0B2     0B3
        .   1F0 1F1 1F2 1F3 .   .   .   1B0     1B1     1B2     1B3     .   .
        .   .   2F0 2F1 2F2 2F3 2B0     2B1     2B2     2B3     .   .   .   .
    """
    _need_interleave("gpipe", interleave, 1, "looped_bfs")
    return [
        [Action(rank, "F", m) for m in range(chunks)] + [Action(rank, "B", m) for m in range(chunks)]
        for rank in range(stages)
    ]


def one_f_one_b(stages: int, chunks: int, interleave: int = 1) -> list[list[Action]]:
    """One forward, one backward: gpipe's bubble, less memory. PipeDream-Flush, arXiv 2006.09503.

    bubble (p-1)/(m+p-1); held p - rank, at most m. Any number of chunks.

    stages=3 chunks=4:
        0F0 0F1 0F2 .   .   .   .   0B0     0F3 0B1     .   0B2     .   0B3
        .   1F0 1F1 .   .   1B0     1F2 1B1     1F3 1B2     .   1B3     .   .
        .   .   2F0 2B0     2F1 2B1     2F2 2B2     2F3 2B3     .   .   .   .
    """
    _need_interleave("1f1b", interleave, 1, "interleaved_1f1b")
    return [
        _alternate(
            [Action(rank, "F", m) for m in range(chunks)],
            [Action(rank, "B", m) for m in range(chunks)],
            warm_up=stages - 1 - rank,
        )
        for rank in range(stages)
    ]


def interleaved_1f1b(stages: int, chunks: int, interleave: int = 2) -> list[list[Action]]:
    """1f1b with several model stages a rank: a smaller bubble, more transfers. Megatron-LM, arXiv 2104.04473.

    Stage s is on rank s mod p. Chunks go in rounds of p (the paper), or of a little more where m is no multiple of p:
    m // p rounds of equal size, or one round of m where m < p. A round passes through a rank's first stage, then
    through its second, and so on. Other m are refused.
    bubble (p-1)/(v m + p-1); held (v-1) p + 2 (p - 1 - rank) + 1 with rounds of p. For m < p a round is too short to
    fill the ranks: the makespan grows by 3 (v-1) (p-m) F. interleave=1 is 1f1b.

    stages=2 chunks=4 interleave=2:
        0F0 0F1 2F0 2F1 0F2 .   2B0     0F3 2B1     2F2 0B0     2F3 0B1     .   2B2     .   2B3     0B2     0B3
        .   1F0 1F1 3F0 3B0     3F1 3B1     1F2 1B0     1F3 1B1     3F2 3B2     3F3 3B3     1B2     1B3     .   .
    """
    if interleave == 1:
        return one_f_one_b(stages, chunks)
    if chunks % _num_rounds(stages, chunks):
        fits = [m for m in range(chunks - stages, chunks + stages) if m > 0 and m % _num_rounds(stages, m) == 0]
        below, above = max(m for m in fits if m < chunks), min(m for m in fits if m > chunks)
        raise ValueError(
            f"interleaved_1f1b runs chunks in chunks // stages equal rounds: chunks={chunks} with stages={stages} does "
            f"not divide into {_num_rounds(stages, chunks)}; set chunks={below} or {above}, or any multiple of stages"
        )
    size = chunks // _num_rounds(stages, chunks)
    starts = range(0, chunks, size)
    ranks = []
    for rank in range(stages):
        own = range(rank, stages * interleave, stages)
        forwards = [Action(s, "F", m) for start in starts for s in own for m in range(start, start + size)]
        backwards = [Action(s, "B", m) for start in starts for s in reversed(own) for m in range(start, start + size)]
        ranks.append(_alternate(forwards, backwards, warm_up=(interleave - 1) * size + 2 * (stages - 1 - rank)))
    return ranks


def looped_bfs(stages: int, chunks: int, interleave: int = 2) -> list[list[Action]]:
    """Breadth first: a rank runs all micro-batches through a stage before its next stage. arXiv 2211.05953.

    Stage s is on rank s mod p. Backwards take the micro-batches in reverse, so gradients equal those of one process to
    rounding only. Few, large transfers of parameters: the schedule for sharded weights.
    bubble (p-1)/(v m + p-1); held v m. For m < p the makespan grows by 3 (v-1) (p-m) F. Any number of chunks.

    stages=2 chunks=3 interleave=2:
        0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B2     2B1     2B0     0B2     0B1     0B0
        .   1F0 1F1 1F2 3F0 3F1 3F2 3B2     3B1     3B0     1B2     1B1     1B0     .   .
    """
    ranks = []
    for rank in range(stages):
        own = range(rank, stages * interleave, stages)
        forwards = [Action(s, "F", m) for s in own for m in range(chunks)]
        backwards = [Action(s, "B", m) for s in reversed(own) for m in reversed(range(chunks))]
        ranks.append(forwards + backwards)
    return ranks


def zb_h1(stages: int, chunks: int, interleave: int = 1) -> list[list[Action]]:
    """Zero bubble with 1f1b's memory: W fills the tail. ZB-H1, arXiv 2401.10241.

    bubble (p-1)/(3m+p-1), a third of 1f1b's idle time: (p-1)(F+I-W) instead of (p-1)(F+I+W); held p on every rank, as
    much as 1f1b on its first. For m < p the makespan grows by (p-m) F. Any number of chunks.

    stages=3 chunks=4:
        0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    _need_interleave("zb_h1", interleave, 1, "zb_v")
    return [_zero_bubble(rank, chunks, warm_up=stages - 1 - rank, delay=rank) for rank in range(stages)]


def zb_h2(stages: int, chunks: int, interleave: int = 1) -> list[list[Action]]:
    """No idle time inside a rank's own span, twice 1f1b's memory; no faster than zb_h1 here. ZB-H2, arXiv 2401.10241.

    It gains nothing in makespan where the optimizer step is synchronous, as it is here: the last rank cannot start
    before (p-1) F and then has m (F+I+W) to do, and zb_h1 already ends there when F = I = W. The paper gets its zero
    bubble by letting rank 0 begin the next step while the last rank still works, which needs an optimizer step without
    a barrier. What is left: where I is longer than W, zb_h1 loses (p-1)(I-W) more than this one.

    bubble (p-1)/(3m+p-1), bubble_in_span 0 for m >= 2p-1; held 2p-1 on every rank. Any number of chunks: W is put
    off for less long when they are fewer than 2p-1, lest the tail outlast the others.

    stages=3 chunks=5:
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 .   .
        .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 .
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """
    _need_interleave("zb_h2", interleave, 1, "zb_v")
    ranks = []
    for rank in range(stages):
        delay = rank + min(rank, max(0, chunks - stages))
        ranks.append(_zero_bubble(rank, chunks, warm_up=2 * (stages - 1 - rank), delay=delay))
    return ranks


def zb_v(stages: int, chunks: int, interleave: int = 2) -> list[list[Action]]:
    """Two stages a rank in a V: no idle time inside a rank's own span with 1f1b's memory. ZB-V.

    arXiv 2401.10241, section 6, and 2405.15362. The first p stages go down the ranks, the others back up, so rank 0 has
    the first and the last.
    bubble (p-1)/(6m+p-1) and bubble_in_span 0 for m >= 2p-1, where F = I = W; held 2p half-ranks, as much as p whole
    ones. Any number of chunks: fewer than 2p-1 run the list for 2p-1 without the micro-batches that are not there.

    stages=2 chunks=4 interleave=2:
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    _need_interleave("zb_v", interleave, 2, "zb_h1")
    filled = max(chunks, 2 * stages - 1)
    ranks = []
    for rank in range(stages):
        below = stages - 1 - rank  # ranks that the V still passes below this one
        program = (
            "f" * (2 * below + 1) + "Ff" * rank + "FIW" * (below + 1)  # warm-up
            + "fiwFIW" * (filled - stages - below) + "iwFIW" * below  # steady state
            + "iI" * rank + "iw" * (below + 1) + "W" * rank + "w" * rank  # cool-down
        )  # fmt: skip
        ranks.append(_spell(program, rank, 2 * stages - 1 - rank, chunks))
    return ranks


def dualpipe_v(stages: int, chunks: int, interleave: int = 2) -> list[list[Action]]:
    """Two stages a rank in a V, forwards paired with backwards so that one's transfers hide behind the other's work.

    DualPipe, arXiv 2412.19437, folded into a V: github.com/deepseek-ai/DualPipe (the eight steps below are its). Here
    the two of a pair run one after the other, F then B. Most backwards are whole, B, which is cheaper than I and W.
    bubble (p-1)/(6m+p-1), where F = I = W; held 2p+1 half-ranks. At least 2p chunks.

    stages=2 chunks=4 interleave=2:
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1     3F2 0B0     3B2     3F3 .   0B1     3B3     0I2 0W2 0I3 0W3
        .   1F0 2F0 1F1 2F1 1F2 2B0     2F2 1B0     1F3 2B1     2F3 1B1     2B2     1B2     2I3 1I3 2W3 1W3
    """
    _need_interleave("dualpipe_v", interleave, 2, "zb_h1")
    if chunks < 2 * stages:
        raise ValueError(
            f"dualpipe_v needs at least 2 x stages = {2 * stages} chunks, not {chunks}: "
            f"set chunks={2 * stages}, or schedule zb_v"
        )
    ranks = []
    for rank in range(stages):
        below = stages - 1 - rank  # ranks that the V still passes below this one
        full, split = ("Bb" * (rank + 1))[: rank + 1], ("Ii" * (rank + 1))[rank + 1 :]
        weights = (split + "i" * below).replace("I", "W").replace("i", "w")  # what was split, oldest first
        program = (
            "f" * (2 * below) + "fF" * (rank + 1) + "IWF" * below  # steps 1 to 3, warm-up
            + "fBFb" * (chunks - stages - below) + "BFb" * below  # 4 and 5, steady state
            + full + split  # 6
            + "".join(w + "i" for w in weights[:below]) + weights[below:]  # 7 and 8
        )  # fmt: skip
        ranks.append(_spell(program, rank, 2 * stages - 1 - rank, chunks))
    return ranks


def _need_interleave(name: str, interleave: int, needed: int, other: str) -> None:
    if interleave != needed:
        raise ValueError(
            f"{name} has {count(needed, 'model stage')} a rank, not interleave={interleave}: "
            f"set interleave={needed}, or another schedule, such as {other}"
        )


def _num_rounds(stages: int, chunks: int) -> int:
    return max(1, chunks // stages)


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Warm-up: forwards only. Steady state: forward, backward. Cool-down: the backwards that are left."""
    steady = max(0, len(forwards) - warm_up)
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + list(chain.from_iterable(pairs)) + backwards[steady:]


def _zero_bubble(rank: int, chunks: int, warm_up: int, delay: int) -> list[Action]:
    """As 1f1b with I for B; from the I number `delay` on, each I is followed by the oldest W that is due."""
    row = [Action(rank, "F", m) for m in range(min(warm_up, chunks))]
    for m in range(chunks):
        if m + warm_up < chunks:
            row.append(Action(rank, "F", m + warm_up))
        row.append(Action(rank, "I", m))
        if m >= delay:
            row.append(Action(rank, "W", m - delay))
    return row + [Action(rank, "W", m) for m in range(max(0, chunks - delay), chunks)]


def _spell(program: str, down: int, up: int, chunks: int) -> list[Action]:
    """A rank's kinds in order -> its actions.

    f, b, i, w are of its stage on the way down the V, F, B, I, W of the one on the way up. Each takes its stage's next
    micro-batch; B and I count together, and W takes those of I. Micro-batches from `chunks` on are left out.
    """
    row = []
    count = dict.fromkeys("fbFB", 0)
    split: dict[str, list[int]] = {"w": [], "W": []}  # micro-batches whose I has run and whose W has not
    for letter in program:
        kind = letter.upper()
        if kind == "W":
            microbatch = split[letter].pop(0)
        else:
            counter = letter.replace("i", "b").replace("I", "B")
            microbatch = count[counter]
            count[counter] += 1
        if kind == "I":
            split["W" if letter == "I" else "w"].append(microbatch)
        if microbatch < chunks:
            row.append(Action(up if letter == kind else down, kind, microbatch))
    return row
