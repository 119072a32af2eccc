"""The resource manager: which devices exist, and which of them a virtual slice gets."""
