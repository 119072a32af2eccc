"""Measures a cluster through the runtime, and writes its cluster file.

    probes     single measurements, each made and compiled once
    measure    all probes of a cluster, round by round
    fit        the cluster that the measurements describe
    file       its TOML
    command    `pathways-plan calibrate`

`probes` and `measure` load JAX and Ray; the rest is pure.
"""
