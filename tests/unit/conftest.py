"""What tests of encrypted connections share."""

from __future__ import annotations

import pytest

from pathways_ray.transport.endpoints import Tls
from tests.certificates import self_signed


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Of 127.0.0.1, signed by itself."""
    certificate, key = self_signed(tmp_path_factory.mktemp("tls"), ["127.0.0.1"])
    return Tls(str(certificate), str(key), str(certificate), "127.0.0.1")
