"""``OpenTelemetry``: spans of saves and loads, and the measures, through the API of OpenTelemetry."""

from __future__ import annotations

from typing import Any

from ..errors import MissingExtraError
from ..events import Event, SaveContext
from .measures import BOUNDARIES, MEASURES, Measures
from .observer import EventObserver
from .phases import Phase, UnderWay

__all__ = ["OpenTelemetry"]


class OpenTelemetry(EventObserver):
    """Makes a span of each save and load, with a child for each phase, and records the measures.

    The span of a save is a root span that is linked to the span that was current at the call, because it outlives that
    one. Its times are those of the events. ``close()`` ends the spans of what is under way.

    Args:
        tracer_provider: The ``TracerProvider``. None: the global one.
        meter_provider: The ``MeterProvider``. None: the global one.

    Raises:
        MissingExtraError: opentelemetry-api is not installed.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            from opentelemetry import context, metrics, trace
        except ImportError as error:
            raise MissingExtraError(
                'OpenTelemetry needs opentelemetry-api: pip install "sidestream[otel]"', extra="otel"
            ) from error
        self._trace, self._root = trace, context.Context()
        self._tracer = trace.get_tracer("sidestream", tracer_provider=tracer_provider)
        meter = metrics.get_meter("sidestream", meter_provider=meter_provider)
        self._measures = Measures(_Instruments(meter))
        super().__init__()

    def close(self) -> None:
        """Observe no more, and end the spans of what is under way. Calling it again has no effect."""
        super().close()
        for one in self._measures.under_way():
            if one.span is not None:
                one.span.end()

    def _observe(self, event: Event) -> None:
        phase = self._measures.take(event)
        if phase is None:
            return
        if phase.name is None:
            phase.of.span = self._begin(phase.of)
        elif phase.of.span is not None:
            self._add(phase, event)

    # --- spans ---

    def _begin(self, one: UnderWay) -> Any:
        current = self._trace.get_current_span().get_span_context()
        links = [self._trace.Link(current)] if current.is_valid else []
        operation = one.context.operation if isinstance(one.context, SaveContext) else "load"
        return self._tracer.start_span(
            f"sidestream.{operation}", context=self._root, links=links, start_time=one.began[1]
        )

    def _add(self, phase: Phase, event: Event) -> None:
        """Add a child for a phase, and end the span with the last one."""
        trace, span = self._trace, phase.of.span
        failed = phase.outcome in ("failed", "cancelled")
        child = self._tracer.start_span(
            f"sidestream.{phase.name}", context=trace.set_span_in_context(span, self._root), start_time=phase.began_ns
        )
        if failed:
            status = trace.Status(trace.StatusCode.ERROR, getattr(event, "reason", ""))
            for one in (child, span):
                one.set_status(status)
                one.set_attribute("error.type", phase.error_type)
        child.end(phase.ended_ns)
        if phase.outcome is not None:
            span.set_attributes(_about(phase))
            span.end(phase.ended_ns)


class _Instruments:
    """The instruments of a meter by the names of the measures."""

    def __init__(self, meter: Any) -> None:
        makers: dict[str, Any] = {
            "counter": meter.create_counter,
            "updown": meter.create_up_down_counter,
            "gauge": meter.create_gauge,
            "histogram": meter.create_histogram,
        }
        self._found: dict[str, Any] = {}
        self._attributes = {one.name: [_attribute(label) for label in one.labels] for one in MEASURES}
        for one in MEASURES:
            more = {"explicit_bucket_boundaries_advisory": BOUNDARIES} if one.kind == "histogram" else {}
            name = f"sidestream.{one.name}"
            self._found[one.name] = makers[one.kind](name, unit=one.unit, description=one.about, **more)

    def add(self, name: str, amount: float, *labels: str) -> None:
        self._found[name].add(amount, self._with_names(name, labels))

    def record(self, name: str, seconds: float, *labels: str) -> None:
        self._found[name].record(seconds, self._with_names(name, labels))

    def set(self, name: str, value: float) -> None:
        self._found[name].set(value)

    def _with_names(self, name: str, labels: tuple[str, ...]) -> dict[str, str]:
        return {key: value for key, value in zip(self._attributes[name], labels, strict=True) if value}


def _attribute(label: str) -> str:
    return "error.type" if label == "error_type" else f"sidestream.{label}"


def _about(phase: Phase) -> dict[str, str | int]:
    """Return the attributes of a span that ends."""
    about, operation = phase.of.context, phase.of
    found: dict[str, str | int | None] = {
        "operation": about.operation,
        "url": about.url,
        "save_id": about.save_id or None,
        "run": about.run,
        "step": about.step,
        "generation": about.generation,
        "rank": about.rank,
        "world_size": about.world,
        "bytes": operation.nbytes,
        "outcome": phase.outcome,
    }
    return {f"sidestream.{key}": value for key, value in found.items() if value is not None}
