"""``Prometheus``: the measures as collectors of prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

from ..errors import MissingExtraError
from ..events import Event
from .measures import BOUNDARIES, MEASURES, Measures
from .observer import EventObserver

_USES = {"counter": "inc", "updown": "inc", "gauge": "set", "histogram": "observe"}


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
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise MissingExtraError(
                'Prometheus needs prometheus_client: pip install "sidestream[prometheus]"', extra="prometheus"
            ) from error
        makers: dict[str, Any] = {"counter": Counter, "histogram": partial(Histogram, buckets=BOUNDARIES)}
        self._registry = REGISTRY if registry is None else registry
        self._constant = dict(labels or {})
        self._found: dict[str, tuple[Any, str]] = {}
        with ExitStack() as registered:
            for one in MEASURES:
                name, labelnames = f"sidestream_{one.prometheus}", (*self._constant, *one.labels)
                made = makers.get(one.kind, Gauge)(name, one.about, labelnames, registry=self._registry)
                registered.callback(self._registry.unregister, made)
                self._found[one.name] = made, _USES[one.kind]
            self._registered = registered.pop_all()
        bound = cache(self._bound)
        self._measures = Measures(lambda name, value, *labels: bound(name, *labels)(value))
        super().__init__()

    def close(self) -> None:
        """Observe no more, and remove the collectors from the registry. Calling it again has no effect."""
        super().close()
        self._registered.close()

    def _observe(self, event: Event) -> None:
        self._measures.take(event)

    def _bound(self, name: str, *labels: str) -> Any:
        """Return the method that takes the values of a measure with these labels."""
        collector, use = self._found[name]
        values = (*self._constant.values(), *labels)
        return getattr(collector.labels(*values) if values else collector, use)
