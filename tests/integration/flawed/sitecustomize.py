"""Python imports this by its name at the start of every process that has this folder on its path."""

from tests.integration.flawed.compilers import break_compilers

break_compilers()
