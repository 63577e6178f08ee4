"""What users of this package test with: an S3 server with faults, and test suites for stores."""
