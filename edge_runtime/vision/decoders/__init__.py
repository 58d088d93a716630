"""One module per output layout: which output shapes fit it, and how its outputs become results."""
