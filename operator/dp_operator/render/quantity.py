"""Arithmetic with Kubernetes quantities, such as 2Gi."""

from __future__ import annotations

import re
from decimal import Decimal

_EXPONENTS = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18, "m": -3, "u": -6, "n": -9}
_SHIFTS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def multiply(quantity: int | str, factor: int) -> str:
    """A Kubernetes quantity times an integer, same suffix: "2Gi" x 4 = "8Gi", "1.5Gi" x 3 = "4.5Gi"."""
    match = re.fullmatch(r"\+?(\d*\.?\d*)(.*)", str(quantity))
    if not match or not match.group(1):
        raise ValueError(f"{quantity!r} is not a quantity such as 2Gi")
    whole, _, fraction = match.group(1).partition(".")
    scaled = int((whole or "0") + fraction) * factor
    digits = str(scaled).rjust(len(fraction) + 1, "0")
    if fraction:
        digits = f"{digits[: -len(fraction)]}.{digits[-len(fraction) :]}".rstrip("0").rstrip(".")
    return digits + match.group(2)


def in_bytes(quantity: int | str) -> int:
    """A quantity as a whole number, rounded down: "2Gi" = 2147483648, "1e3" = 1000. Raises ValueError."""
    match = re.fullmatch(r"\+?(\d+\.?\d*|\.\d+)(?:([KMGTPE]i|[numkMGTPE]?)|[eE]([-+]?\d+))", str(quantity))
    if not match:
        raise ValueError(f"{quantity!r} is not a quantity such as 2Gi")
    number, suffix, exponent = Decimal(match[1]), match[2] or "", match[3]
    if exponent is not None:
        return int(number * Decimal(10) ** int(exponent))
    if suffix in _SHIFTS:
        return int(number * 2 ** _SHIFTS[suffix])
    return int(number * Decimal(10) ** _EXPONENTS[suffix])
