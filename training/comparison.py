"""What verify.py compares, as data: the relative errors of one case, from the ranks to the front. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Row:
    """One parameter on one rank: relative errors |got - expected| / |expected| (norms); inf when it is missing."""

    parameter: str
    rank: int  # -1: on none
    gradient_error: float
    weight_error: float


@dataclass
class Report:
    """A whole comparison; `rows` worst first."""

    loss_error: float
    norm_error: float
    rows: list[Row]

    @staticmethod
    def from_dict(values: dict) -> Report:
        return Report(**values | {"rows": [Row(**row) for row in values["rows"]]})

    @property
    def worst(self) -> tuple[float, str]:
        """Largest relative error of all, and what it is of."""
        errors = [(self.loss_error, "the loss"), (self.norm_error, "the gradient norm")]
        for row in self.rows[:1]:
            errors.append((row.gradient_error, f"the gradient of {row.parameter}"))
            errors.append((row.weight_error, f"the weights of {row.parameter}"))
        return max(errors)
