"""How all tests draw at random.

CI draws the same examples each time: a change fails for what it changes. Everybody else draws new ones, and what they
find becomes an example. Neither judges by the clock: machines are slow and shared.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",
    deadline=None,
    derandomize="CI" in os.environ,
    # Random specs are many-sided, so most are filtered out; that costs time, which is not judged here.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("steady")
