"""Test tools for users of this package: an S3 server with faults, and test suites for stores."""
