"""``OpenTelemetry``: spans of saves and loads, and the measures, through the API of OpenTelemetry."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..errors import MissingExtraError
from ..events import Event
from .measures import BOUNDARIES, MEASURES, Measures
from .observer import QueuedObserver
from .phases import Phase

_USES = {
    "counter": ("create_counter", "add"),
    "updown": ("create_up_down_counter", "add"),
    "gauge": ("create_gauge", "set"),
    "histogram": ("create_histogram", "record"),
}


class OpenTelemetry(QueuedObserver):
    """Makes a span of each save and load, with a child for each phase, and records the measures.

    The span of a save is a root span that is linked to the span that was current at the call, because it outlives that
    one. Its times are those of the events. A thread of its own makes the spans, so an exporter that hangs holds up no
    save. ``close()`` ends the spans of what is under way.

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
        self._instruments = _instruments(metrics.get_meter("sidestream", meter_provider=meter_provider))
        self._measures = Measures(self._put)
        super().__init__("OpenTelemetry")

    def _noted(self) -> Any:
        return self._trace.get_current_span().get_span_context()

    # --- the thread ---

    def _take(self, event: Event, noted: Any) -> None:
        phase = self._measures.take(event)
        if phase is None:
            return
        if phase.name is None:
            phase.of.note = self._begin(phase, noted)
        else:
            self._add(phase, event)

    def _end(self) -> None:
        for one in self._measures.under_way():
            one.note.end()

    def _begin(self, phase: Phase, current: Any) -> Any:
        one = phase.of
        return self._tracer.start_span(
            f"sidestream.{one.context.operation if one.kind == 'save' else 'load'}",
            context=self._root,
            links=[self._trace.Link(current)] if current.is_valid else [],
            start_time=phase.began[1],
        )

    def _add(self, phase: Phase, event: Event) -> None:
        """Add a child for a phase, and end the span with the last one."""
        trace, span = self._trace, phase.of.note
        context = trace.set_span_in_context(span, self._root)
        child = self._tracer.start_span(f"sidestream.{phase.name}", context=context, start_time=phase.began[1])
        if phase.outcome in ("failed", "cancelled"):
            status = trace.Status(trace.StatusCode.ERROR, getattr(event, "reason", ""))
            for one in (child, span):
                one.set_status(status)
                one.set_attribute("error.type", phase.error_type)
        child.end(phase.ended[1])
        if phase.outcome is not None:
            span.set_attributes(_about(phase))
            span.end(phase.ended[1])

    def _put(self, name: str, value: float, *labels: str) -> None:
        use, attributes = self._instruments[name]
        use(value, {key: label for key, label in zip(attributes, labels, strict=True) if label})


def _instruments(meter: Any) -> dict[str, tuple[Any, list[str]]]:
    """Make the instrument of each measure. Return the methods that take their values, and their attributes."""
    found: dict[str, tuple[Any, list[str]]] = {}
    for one in MEASURES:
        maker, use = _USES[one.kind]
        more = {"explicit_bucket_boundaries_advisory": BOUNDARIES} if one.kind == "histogram" else {}
        made = getattr(meter, maker)(f"sidestream.{one.name}", unit=one.unit, description=one.about, **more)
        attributes = ["error.type" if label == "error_type" else f"sidestream.{label}" for label in one.labels]
        found[one.name] = getattr(made, use), attributes
    return found


def _about(phase: Phase) -> dict[str, str | int]:
    """Return the attributes of a span that ends."""
    about = phase.of.context
    found = {field.name: getattr(about, field.name) for field in fields(about)}
    found |= {"save_id": about.save_id or None, "bytes": phase.of.nbytes, "outcome": phase.outcome}
    found["world_size"] = found.pop("world")
    return {f"sidestream.{key}": value for key, value in found.items() if value is not None}
