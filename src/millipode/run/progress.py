"""How a solve shows its progress and can be interrupted: between compiled segments, on the host."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self


class Progress(NamedTuple):
    """The progress of a solve.

    Attributes:
        t: the time reached.
        h: the size of the next step.
        accepted: the number of accepted steps.
        rejected: the number of rejected attempts.
        rate: recent attempts per second.
    """

    t: float
    h: float
    accepted: int
    rejected: int
    rate: float


class ProgressBar:
    """A progress bar that shows t, h, accepted and rejected steps, the rate, and the remaining time.

    Args:
        t0: the start of the time span.
        t1: its end.
    """

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

    def __call__(self, now: Progress) -> None:
        """Draw the bar for this progress."""
        span = self.t1 - self.t0
        self.bar.n = (now.t - self.t0) / span if span else 1.0
        self.bar.set_description_str(
            f"t={now.t:.4g}, h={now.h:.2e}, {now.accepted} accepted, {now.rejected} rejected, "
            f"{now.rate:.3g} steps/s"
        )

    def close(self) -> None:
        """Close the bar and leave it as it is."""
        self.bar.close()


Show = Callable[[Progress], None]


class Interruption:
    """Turns Ctrl-C into a request, so that a solve can stop without losing its results.

    A second Ctrl-C raises ``KeyboardInterrupt``.

    Attributes:
        requested: whether Ctrl-C has been pressed.

    >>> with Interruption() as interruption:
    ...     signal.raise_signal(signal.SIGINT)
    >>> interruption.requested
    True
    """

    def __init__(self) -> None:
        self.requested = False
        self.before: Any = None

    def __enter__(self) -> Self:
        # Only the main thread may set handlers, and only Python's default handler is replaced.
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours and threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._request)
        return self

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
