"""Tests that need a GPU; elsewhere they skip and say so."""
