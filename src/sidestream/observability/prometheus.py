"""``Prometheus``: the measures as collectors of prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MissingExtraError
from ..events import Event
from .measures import BOUNDARIES, MEASURES, Measure, Measures
from .observer import EventObserver

__all__ = ["Prometheus"]


class Prometheus(EventObserver):
    """Registers collectors that count saves, loads, and what they cost. It opens no port: the program serves the
    registry as it does otherwise.

    ``close()`` also removes the collectors from the registry.

    Args:
        registry: The ``CollectorRegistry``. None: the default one of prometheus_client.
        labels: Constant labels of all collectors, such as the name of the job. Their values have to be few.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ValueError: The registry has these collectors already.
    """

    def __init__(self, registry: Any = None, labels: Mapping[str, str] | None = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError(
                'Prometheus needs prometheus_client: pip install "sidestream[prometheus]"', extra="prometheus"
            ) from error
        self._collectors = _Collectors(
            prometheus_client, prometheus_client.REGISTRY if registry is None else registry, dict(labels or {})
        )
        self._measures = Measures(self._collectors)
        super().__init__()

    def close(self) -> None:
        """Observe no more, and remove the collectors from the registry. Calling it again has no effect."""
        super().close()
        self._collectors.unregister()

    def _observe(self, event: Event) -> None:
        self._measures.take(event)


class _Collectors:
    """The collectors by the names of the measures, each with the ``constant`` labels."""

    def __init__(self, prometheus_client: Any, registry: Any, constant: Mapping[str, str]) -> None:
        self._registry = registry
        self._constant = constant
        self._found: dict[str, Any] = {}
        kinds = {"counter": prometheus_client.Counter, "histogram": prometheus_client.Histogram}
        try:
            for one in MEASURES:
                self._found[one.name] = self._made(kinds.get(one.kind, prometheus_client.Gauge), one)
        except ValueError:
            self.unregister()
            raise

    def _made(self, kind: Any, one: Measure) -> Any:
        more = {"buckets": BOUNDARIES} if one.kind == "histogram" else {}
        names = (*self._constant, *one.labels)
        return kind(f"sidestream_{one.prometheus}", one.about, names, registry=self._registry, **more)

    def unregister(self) -> None:
        while self._found:
            self._registry.unregister(self._found.popitem()[1])

    def add(self, name: str, amount: float, *labels: str) -> None:
        if child := self._child(name, labels):
            child.inc(amount)

    def record(self, name: str, seconds: float, *labels: str) -> None:
        if child := self._child(name, labels):
            child.observe(seconds)

    def set(self, name: str, value: float) -> None:
        if child := self._child(name, ()):
            child.set(value)

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        """Return where a value goes; None after ``unregister()``, which another thread may call meanwhile."""
        collector, values = self._found.get(name), (*self._constant.values(), *labels)
        return collector.labels(*values) if collector is not None and values else collector
