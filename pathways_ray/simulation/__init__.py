"""The deterministic simulator: whole clusters under a virtual clock, with faults drawn from a seed."""
