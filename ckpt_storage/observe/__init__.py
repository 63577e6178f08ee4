"""How operations are observed: statistics, a line in the log, OpenTelemetry."""
