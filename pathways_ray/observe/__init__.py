"""Views of what runs and what waits: values that cores make, and pure functions that explain and draw them."""
