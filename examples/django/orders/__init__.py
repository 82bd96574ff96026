"""Orders, and the letter that a model writes for each."""
