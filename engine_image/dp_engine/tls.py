"""TLS of what listens to clients and probes: API servers, and the supervisor's page, which vLLM serves with the same keys."""

from __future__ import annotations

import ssl

from dp_engine.options import Options


def server_context(options: Options) -> ssl.SSLContext | None:
    """Certificate and key as --ssl-certfile and --ssl-keyfile say; None for plain HTTP."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    return context
