"""Refusal of `pw.init` at an address, printed as the kind of the error and its text."""

from __future__ import annotations

import json
import sys

import ray

import pathways_ray as pw

try:
    pw.init(address=sys.argv[1])
except pw.errors.PathwaysError as error:
    print(json.dumps([type(error).__name__, str(error)]))
assert not ray.is_initialized()
