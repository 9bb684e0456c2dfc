"""Section 5.3 of the paper: linear warm-up, then decay with the inverse square root of the update's number."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InverseSquareRootSchedule:
    """The learning rate as a pure function of the update's number (the first update is 1).

        rate(n) = peak * min(n / warmup_steps, sqrt(warmup_steps / n))

    With peak = d_model^-0.5 * warmup_steps^-0.5 this is the paper's equation (3),
    d_model^-0.5 * min(n^-0.5, n * warmup_steps^-1.5). In the last `cooldown_steps` of `max_updates` updates the rate is
    also multiplied by a factor that falls linearly, to zero after the last update; the paper has no such phase.

    Args:
        peak: The rate at update `warmup_steps`, its largest.
        warmup_steps: Updates of warm-up. 0 means none: the decay then starts at `peak` with update 1.
        cooldown_steps: Updates of the final linear fall; 0 for none.
        max_updates: The last update, needed only for the fall.
    """

    peak: float
    warmup_steps: int
    cooldown_steps: int = 0
    max_updates: int | None = None

    def __post_init__(self) -> None:
        if not self.peak > 0:
            raise ValueError(f"the peak learning rate ({self.peak}) must be greater than 0")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not be negative")
        if self.cooldown_steps and (self.max_updates is None or self.max_updates < self.cooldown_steps):
            raise ValueError(f"cooldown_steps ({self.cooldown_steps}) must fit in max_updates ({self.max_updates})")

    @classmethod
    def from_d_model(cls, d_model: int, warmup_steps: int, **kwargs: int | None) -> "InverseSquareRootSchedule":
        """Return the paper's schedule, whose peak follows from the model's width."""
        if warmup_steps < 1:
            raise ValueError(f"the paper's schedule needs warmup_steps of at least 1, got {warmup_steps}")
        return cls((d_model * warmup_steps) ** -0.5, warmup_steps, **kwargs)

    def __call__(self, update: int) -> float:
        """Return the learning rate of update `update` (from 1)."""
        if update < 1:
            raise ValueError(f"updates are counted from 1, got {update}")
        warmup = max(self.warmup_steps, 1)
        rate = self.peak * min(update / warmup, (warmup / update) ** 0.5)
        if self.cooldown_steps and self.max_updates is not None:
            left = self.max_updates + 1 - update
            rate *= max(0.0, min(1.0, left / (self.cooldown_steps + 1)))
        return rate
