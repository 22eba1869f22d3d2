"""`from pipeline import Pipe` in a plain loop: same numbers as the unpipelined layers, clear refusals, a clean exit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from pipeline import Pipe
from ranks import ROOT


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("balance, chunks", [([5], 1), ([3, 2], 4), ([1, 1, 1, 1, 1], 3), (None, 2)])
def test_outputs_and_gradients_are_those_of_the_plain_layers(balance, chunks, checkpoint):
    plain, x = _layers(), torch.randn(10, 6, dtype=torch.float64)  # 10 rows: uneven micro-batches for 3 and 4 chunks
    plain(x).square().sum().backward()
    with Pipe(_layers(), balance, chunks=chunks, checkpoint=checkpoint) as pipe:
        output = pipe(x)
        output.square().sum().backward()
        assert torch.allclose(output, plain(x), rtol=1e-12)
        pairs = list(zip(pipe.parameters(), plain.parameters(), strict=True))
    assert len(pairs) == 6
    for got, expected in pairs:
        assert torch.allclose(got.grad, expected.grad, rtol=1e-10)


def test_a_list_of_layers_and_a_training_loop():
    pipe = Pipe(list(_layers()), balance=[3, 2], devices=["cpu", "cpu"], chunks=4, checkpoint="except_last")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    x, losses = torch.randn(16, 6, dtype=torch.float64), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (pipe(x) - x[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipe(x)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(balance=[3, 3]), "sum to the 5 layers"),
        (dict(balance=[5, 0]), "at least 1"),
        (dict(balance=[3, 2], devices=["cpu"]), "1 devices"),
        (dict(balance=[3, 2], chunks=0), "chunks=0"),
        (dict(balance=[3, 2], checkpoint="sometimes"), "except_last"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        Pipe(_layers(), **arguments)


def test_a_pipe_that_is_still_open_does_not_hang_the_interpreter():
    code = (
        "import torch; from torch import nn; from pipeline import Pipe\n"
        "pipe = Pipe([nn.Linear(4, 4), nn.Linear(4, 4)], balance=[1, 1], chunks=2)\n"
        "pipe(torch.randn(4, 4)).sum().backward()\n"
        "print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")
