"""The few API calls that the bed itself makes, as administrator."""

import http.client
import json
import ssl
from typing import Any

from . import addresses, certificates

TIMEOUT_S = 10.0


def request(method: str, path: str, body: object = None) -> tuple[int, Any]:
    """One call; returns the HTTP status and the decoded answer. OSError or HTTPException without an answer."""
    context = ssl.create_default_context(cafile=str(certificates.CA))
    context.load_cert_chain(certificates.certificate("admin"), certificates.key("admin"))
    connection = http.client.HTTPSConnection(
        addresses.CONTROL_PLANE, addresses.API_PORT, timeout=TIMEOUT_S, context=context
    )
    try:
        headers = {"Content-Type": "application/json", "User-Agent": "dp-bed"}
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else text


def missing(path: str) -> str | None:
    """None if GET answers 200, else what came instead."""
    try:
        status, answer = request("GET", path)
    except (OSError, http.client.HTTPException) as error:
        return f"GET {path}: {error}"
    return None if status == 200 else f"GET {path}: HTTP {status} {str(answer)[:200]}"
