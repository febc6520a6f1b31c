"""A progress bar that is drawn between compiled segments."""

from typing import Any


class ProgressBar:
    """Shows t, h, accepted and rejected steps, and the rate."""

    def __init__(self, t0: float, t1: float):
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True needs tqdm: pip install 'millipode[cli]', or leave progress out."
            ) from error
        self.t0, self.t1 = t0, t1
        self.bar: Any = tqdm(
            total=1.0,
            bar_format="{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]",
        )

    def update(self, t: float, h: float, accepted: int, rejected: int, rate: float) -> None:
        """Draw the bar at time t; ``rate`` is in attempted steps per second."""
        span = self.t1 - self.t0
        self.bar.n = (t - self.t0) / span if span else 1.0
        self.bar.set_description_str(
            f"t={t:.4g}, h={h:.2e}, {accepted} accepted, {rejected} rejected, {rate:.3g} steps/s"
        )

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.close()
