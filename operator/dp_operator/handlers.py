"""kopf's side: every watched kind has one three-line handler that passes the event on and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from dp_operator.api import KIND
from dp_operator.cache import NODE, WATCHED
from dp_operator.client import RESOURCES, credentials
from dp_operator.naming import LABEL_MANAGED_BY, MANAGER

WATCH_RETRY_S = 3

Seen = Callable[[str, dict[str, Any]], None]


def registry(seen: Seen, relisted: Callable[[], None], *, nodes: bool) -> kopf.OperatorRegistry:
    """Handlers for the custom resource, for every kind of object made for it and, if they may be read, for nodes."""
    handlers = kopf.OperatorRegistry()
    for kind in (KIND, *WATCHED, *((NODE,) if nodes else ())):
        _watch(handlers, kind, seen, relisted)

    @kopf.on.login(registry=handlers)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return credentials()

    return handlers


def _watch(handlers: kopf.OperatorRegistry, kind: str, seen: Seen, relisted: Callable[[], None]) -> None:
    version, plural = RESOURCES[kind]
    labels = None if kind in (KIND, NODE) else {LABEL_MANAGED_BY: MANAGER}

    # async, so that it runs in the event loop: cache and queue belong to it.
    @kopf.on.event(version, plural, registry=handlers, labels=labels, id=f"see-{plural}")
    async def see(event: dict[str, Any], **_: Any) -> None:
        if event["type"] is None:
            relisted()
        seen(kind, event)


def settings() -> kopf.OperatorSettings:
    """Kopf as a harness only: no peering, no posting of its own, no scanning for new kinds."""
    chosen = kopf.OperatorSettings()
    chosen.peering.standalone = True
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.process.ultimate_exiting_timeout = 25
    # kopf's own waits grow to 21 s: so long pods would go unseen after the API server is back. As patient in all.
    chosen.networking.error_backoffs = (0.5, 1, 1, *[WATCH_RETRY_S] * 18)
    for kind in WATCHED:
        version, plural = RESOURCES[kind]
        chosen.watching.label_selectors[version, plural] = f"{LABEL_MANAGED_BY}={MANAGER}"
    return chosen
