"""Python imports this by its name at the start of every process that has this folder on its path."""

from tests.integration.disordered.orders import ignore_order

ignore_order()
