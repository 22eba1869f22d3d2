"""What rank 0 shows while training: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm


class Progress:
    """Loss, learning rate, tokens/s and remaining time of each step.

    time_scale: of an emulated run, whose rates are shown as those of its hardware; None: a real one.
    """

    def __init__(self, steps: int, log_every: int, *, first: int = 0, time_scale: float | None = None):
        self.steps, self.log_every, self.time_scale = steps, max(1, log_every), time_scale
        self.bar = None
        if _is_terminal():
            self.bar = tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True, file=sys.stdout)

    def step(
        self, done: int, loss: float | None, learning_rate: float | None, tokens_per_s: float, step_time_s: float
    ) -> None:
        """After step number `done` (from 1); rates are of this step. An emulated one has no loss."""
        if self.time_scale is None:
            figures = f"loss {loss:.4f}  lr {learning_rate:.2e}  {tokens_per_s:,.0f} tokens/s"
        else:
            figures = f"emulated {step_time_s / self.time_scale:.3f} s  {tokens_per_s * self.time_scale:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(figures, refresh=False)
            self.bar.update()
        elif done == 1 or done % self.log_every == 0 or done == self.steps:
            left = duration((self.steps - done) * step_time_s)
            print(f"step {done:>{len(str(self.steps))}}/{self.steps}  {figures}  {left} left", flush=True)

    def say(self, text: str) -> None:
        """A line beside the bar."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _is_terminal() -> bool:
    """Whether stdout is a terminal that knows its size: in one that does not, tqdm shows nothing at all."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):  # no terminal, or no file at all
        return False
    return size.lines > 0 and size.columns > 0


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
