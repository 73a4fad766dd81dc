"""Metrics for Prometheus; no client id is ever a label."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from acclimate_service.state_metrics import StateMetrics

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Telemetry:
    """The service's own registry: two apps in one process do not share numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        on = self.registry
        self.requests = Counter("acclimate_requests", "Requests by route and status.", ["route", "status"], registry=on)
        self.request_seconds = Histogram(
            "acclimate_request_duration_seconds",
            "Duration of requests by route.",
            ["route"],
            buckets=_SECONDS,
            registry=on,
        )
        self.step_seconds = Histogram(
            "acclimate_step_seconds",
            "Duration of adapter steps; those taken together are one.",
            buckets=_SECONDS,
            registry=on,
        )
        self.step_batches = Histogram(
            "acclimate_step_batches", "Batches that were answered together.", buckets=_SIZES, registry=on
        )
        self.step_rows = Histogram(
            "acclimate_step_rows", "Images that were answered together.", buckets=_SIZES, registry=on
        )
        self.rows = Counter("acclimate_rows", "Images answered.", registry=on)
        self.fallbacks = Counter("acclimate_fallbacks", "Steps that the guard rails answered unadapted.", registry=on)
        self.waiting = Gauge("acclimate_waiting", "Batches in the queue or at work.", registry=on)
        self.labels = Counter("acclimate_labels", "Labels told, by what became of them.", ["result"], registry=on)
        self.guarded = Counter("acclimate_guarded_answers", "Answers of the frozen model.", ["because"], registry=on)
        self.switches = Counter(
            "acclimate_guard_switches", "Changes of a client's answers.", ["to", "because"], registry=on
        )
        self.adapter_switches = Counter(
            "acclimate_adapter_switches", "Changes to a better candidate.", ["to", "because"], registry=on
        )
        self.state = StateMetrics(on)
        self.ready = Gauge("acclimate_ready", "1 when the service answers batches.", registry=on)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
