"""Floor 4: whether a layout trains as one process does. A run is shrunk, trained both ways on CPU ranks, compared."""
