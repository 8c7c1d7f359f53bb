"""Tests: `unit` (one process), `distributed` (ranks on gloo), `functional` (whole runs), `gpu` (one NVIDIA GPU)."""
