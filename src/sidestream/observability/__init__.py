"""Observers that show what saves and loads do, and what they cost the training.

Each is made with its options, observes from then on, and ends with ``close()`` or its ``with`` block. It imports the
package that it needs when it is made.
"""

from __future__ import annotations

from .costs import CostReport, Costs
from .dcp_log import DCPLog
from .journal import Journal
from .observer import EventObserver
from .otel import OpenTelemetry
from .prometheus import Prometheus

__all__ = ["CostReport", "Costs", "DCPLog", "EventObserver", "Journal", "OpenTelemetry", "Prometheus"]
