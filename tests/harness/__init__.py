"""What the tests are built with: ranks on demand, a counter of collectives, closeness, shared data."""
