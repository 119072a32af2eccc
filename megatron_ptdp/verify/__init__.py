"""Proof of parity: the runtime computes, in every way to compute it, the result of one device.

    cases       the settings of a case, and the grids of cases
    pairs       every pair of settings in few cases
    models      tiny models, their parameters and batches
    reference   the results of one device, by code of its own
    runs        the results of the runtime, by its public API
    compare     differences, and their bounds
    planted     bugs planted into the training step, which the checks must find
    checks      the questions, and their measured answers
    report      the answers as a table and as JSON
    command     `pathways-train verify`

docs/parity.md states what this proves, and what it does not.
"""
