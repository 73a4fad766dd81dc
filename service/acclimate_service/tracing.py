"""Traces by OpenTelemetry, when its standard variables say where they are to go: a span for each request, and below it
one for each thing that the request was at.

The spans of a request are made when it is over, from the times that were noted anyhow: it takes no longer for them.
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from acclimate_service.metrics import Spell

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
_FAILED: Final = 500
_log = logging.getLogger(__name__)


class Tracing:
    """Sends the spans of requests away, in the background.

    Args:
        provider: of the library, which knows whither, how often and how many of them.
        version: of the service.
    """

    def __init__(self, provider: "TracerProvider", version: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("acclimate", version)
        self._propagator = TraceContextTextMapPropagator()

    def note_request(
        self,
        headers: Mapping[str, str],
        method: str,
        route: str,
        status: int,
        began: float,
        spells: Iterable[Spell],
        ids: Mapping[str, str],
    ) -> str:
        """Make the spans of a request that is over; they continue the trace of its caller, if it names one.

        Args:
            headers: `traceparent` and `tracestate`, where the caller sent them.
            method, route, status: what was asked, by its pattern, and how it was answered.
            began: when (`time.monotonic()`).
            spells: what it was at.
            ids: of the request, its client and so on, none of them in clear.

        Returns:
            Id of the trace (32 hex digits).
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        zero = time.time_ns() - time.monotonic_ns()

        def moment(seconds: float) -> int:
            return zero + int(1e9 * seconds)

        described: dict[str, str | int] = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
        }
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={**described, **{f"acclimate.{name}": value for name, value in ids.items() if value}},
            start_time=moment(began),
        )
        if status >= _FAILED:
            span.set_status(StatusCode.ERROR)
        below = set_span_in_context(span)
        for phase, start, end in list(spells):
            kind = SpanKind.CLIENT if phase == "store" else SpanKind.INTERNAL
            child = self._tracer.start_span(phase, context=below, kind=kind, start_time=moment(start))
            child.end(moment(end))
        span.end(time.time_ns())
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send what is left, as long as the exporter's time-out allows."""
        self._provider.shutdown()


def open_tracing(version: str, replica: str) -> Tracing | None:
    """Traces, if the standard variables name an endpoint for them; else None, and the log says what is in the way.

    Args:
        version: of the service.
        replica: name of this one.
    """
    wanted = any(os.environ.get(name) for name in _ENDPOINTS)
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        _log.warning("no traces are sent: %s is %s; accepted is %s", _PROTOCOLS[1], protocol, _PROTOCOL)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        _log.warning('no traces are sent: %s is not installed; pip install "acclimate[otel]"', error.name)
        return None
    own = Resource({"service.name": "acclimate", "service.version": version, "service.instance.id": replica})
    provider = TracerProvider(resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, version)
