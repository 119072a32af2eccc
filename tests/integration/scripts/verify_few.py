"""A few checks of `pathways-train verify` on one cluster: starting one takes as long as three checks."""

from __future__ import annotations

import json

import jax

import pathways_ray as pw
from megatron_ptdp.verify.cases import DEVICES, ISLANDS, Case
from megatron_ptdp.verify.checks import PLANTED, Check, answered, record

jax.config.update("jax_enable_x64", True)

todo = [
    Check("gradients", PLANTED),
    Check("mistake", PLANTED, planted_bug="stale-tied"),
    Check("mistake", PLANTED, planted_bug="norm-unsummed"),
    Check("mistake", Case("gpt-untied", t=2), planted_bug="stale-tied"),  # changes nothing: nothing is tied
    Check("gradients", Case("gpt-untied", p=4, t=4)),
]
with pw.init(ISLANDS, 1, DEVICES):
    print(json.dumps([record(answered(check, "float64")) for check in todo]))
