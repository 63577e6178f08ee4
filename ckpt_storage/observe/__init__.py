"""What an operation did: its statistics, one line in the log, and OpenTelemetry."""
