"""Tests of whole runs: parity, resume, examples, what the README shows."""
