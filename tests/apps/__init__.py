"""Applications that tests run in real worker and beat processes."""
