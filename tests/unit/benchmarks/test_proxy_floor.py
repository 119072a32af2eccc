"""What stands in for a session behind the floor of the proxy's benchmark."""

from __future__ import annotations

import ast
import inspect

from benchmarks.proxy_floor import NoSession
from pathways_ray.proxy import carrier


def test_it_has_all_that_a_proxy_asks_of_a_session() -> None:
    """Else JAX's client has an error in place of an answer, and what is measured is that."""
    asked = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(carrier)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.session"
    }
    assert asked
    assert not asked - set(dir(NoSession()))
