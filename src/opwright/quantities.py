"""Numbers as people read them: three significant digits, and always a unit.

Times come in microseconds, rates in GB/s and GFLOP/s, as in the records.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone

_LAST_SECOND = 253402300799  # of the year 9999
Units = tuple[tuple[float, str], ...]

TIME: Units = ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"))
RATE: Units = ((1e-3, "MB/s"), (1.0, "GB/s"), (1e3, "TB/s"))
COMPUTE: Units = ((1e-3, "MFLOP/s"), (1.0, "GFLOP/s"), (1e3, "TFLOP/s"))
COUNT: Units = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))
BYTES: Units = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))


def round_to(value: float, digits: int = 3) -> str:
    """Writes a number with so many significant digits: `0.00123`, `12.3`, `1,230`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - int(text.split("e")[1]))
    return f"{float(text):,.{decimals}f}"


def with_unit(value: float, units: Units, digits: int = 3) -> str:
    """Writes a number in the largest unit that leaves at least 1 before the point."""
    scaled, unit = _scale(value, units)
    is_whole = (
        unit == units[0][1] and units[0][0] == 1 and scaled == int(scaled)
    )  # of what is counted: 48 B, not 48.0 B
    return f"{int(scaled) if is_whole else round_to(scaled, digits)} {unit}".rstrip()


def tick_with_unit(value: float, units: Units) -> str:
    """Writes the number of an axis tick, as short as it can be: `10 µs`, not `10.0 µs`."""
    scaled, unit = _scale(value, units)
    return f"{scaled:.3g} {unit}".rstrip()


def percent(share: float, digits: int = 3) -> str:
    """Writes a share, 1 being everything, in percent."""
    return f"{round_to(100 * share, digits)} %"


def date(seconds: float) -> str:
    """Writes a time stamp, seconds since 1970, in UTC; clamps it to the range that can be written."""
    seconds = min(max(seconds, 0), _LAST_SECOND)
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def rate_gb_s(bytes_moved: int, time_us: float) -> float:
    """Returns the rate in GB/s, 1e9 bytes per second."""
    return bytes_moved / time_us / 1e3


def rate_gflop_s(flop: int, time_us: float) -> float:
    """Returns the rate in GFLOP/s, 1e9 operations per second."""
    return flop / time_us / 1e3


def _scale(value: float, units: Units) -> tuple[float, str]:
    # Rounding comes before the choice of a unit, or 999.9 ns would be written as 1,000 ns.
    rounded = float(f"{value:.2e}")
    factor, unit = next(((f, u) for f, u in reversed(units) if abs(rounded) >= f * (1 - 1e-9)), units[0])
    return value / factor, unit
