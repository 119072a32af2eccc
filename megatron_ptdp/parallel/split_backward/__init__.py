"""A backward in two parts: the gradient of a stage's input (I), and that of its parameters (W)."""
