"""Proof of parity: what the runtime computes, in all ways that it can, is what one device computes.

    cases       what is varied, the grids
    pairs       every pair of settings in few cases
    models      what is computed: tiny models, their parameters, batches
    truth       by one device, with code of its own
    runs        by the runtime, as a user does it
    compare     how far they are apart, and may be
    checks      the questions, mistakes on purpose among them
    report      the answers
    command     `pathways-train verify`

docs/parity.md says what this proves, and what it does not.
"""
