"""Growth of time and memory: exponents fitted to the growth series."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

UNITS = {"size": "GB", "nodes": "1,000 nodes", "layers": "layer", "files": "file"}
SCALE = {"size": 1e9, "nodes": 1e3, "layers": 1.0, "files": 1.0}
LINEAR = 1.1  # an exponent up to here counts as linear: what is beyond is more than noise


@dataclass(frozen=True)
class Series:
    name: str
    amounts: list[float]
    wall: list[float]
    cpu: list[float]
    rss: list[float]

    def exponent(self, values: list[float]) -> float:
        """The log-log slope over the upper half, where the start-up weighs least."""
        half = len(values) // 2
        x = [math.log(amount) for amount in self.amounts[half:]]
        y = [math.log(value) for value in values[half:]]
        return statistics.linear_regression(x, y).slope

    def cost(self) -> float:
        """CPU milliseconds for one more unit, between the first point and the last."""
        more = (self.amounts[-1] - self.amounts[0]) / SCALE[self.name]
        return (self.cpu[-1] - self.cpu[0]) / more * 1000

    @property
    def linear(self) -> bool:
        return max(self.exponent(self.cpu), self.exponent(self.rss)) <= LINEAR


def read(results: dict[str, Any]) -> list[Series]:
    return [_series(name, points) for name, points in results.get("growth", {}).items()]


def _series(name: str, points: list[dict[str, Any]]) -> Series:
    ours = [point["contenders"][0]["median"] for point in points]
    amounts = [float(point["amount"]) for point in points]
    return Series(
        name, amounts, *([median[what] for median in ours] for what in ("wall", "cpu", "rss"))
    )
