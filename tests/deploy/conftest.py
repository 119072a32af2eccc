"""Processes as the integration tests start them."""

from tests.integration.conftest import python

__all__ = ["python"]
