"""Prometheus metrics, under controller-runtime's names where it has one."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

RECONCILES = Counter("controller_reconcile", "Reconciliations by result.", ["result"])
QUEUE_DEPTH = Gauge("workqueue_depth", "Keys waiting for a worker.")
QUEUE_VISIT = Gauge("workqueue_longest_running_processor_seconds", "How long the slowest worker has been with its key.")
QUEUE_AGE = Gauge("workqueue_oldest_age_seconds", "How long the first of them has waited.")
