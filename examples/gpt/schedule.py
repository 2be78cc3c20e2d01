"""When training stops to look at the held-out files."""

EVALUATIONS = 10  # while there is time for so many


class Schedule:
    """EVALUATIONS times; on a slow machine so rarely that it takes a tenth of the time at most.

    Times are in seconds since the start.
    """

    def __init__(self, seconds: float):
        self.interval = self.next = seconds / EVALUATIONS

    def is_due(self, now: float) -> bool:
        return now >= self.next

    def took(self, now: float, duration: float) -> None:
        """It was evaluated from `now` on, for so long."""
        self.next = now + max(self.interval, 10 * duration)
