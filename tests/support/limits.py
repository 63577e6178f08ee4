"""The limits of tests in seconds: a hang fails, a busy machine does not.

A test that compares a clock with a promised deadline bears the marker `deadline`: `.ci/run` runs
those while nothing else runs. All other waits end after `HANG_S`.
"""

HANG_S = 240.0
"""No wait takes so long on any machine."""

JOB_S = 1.5 * HANG_S
"""No process or rank of a test takes so long; its own waits end before. Below pytest's limit."""

SLACK_S = 5.0
"""What is promised beyond a deadline."""
