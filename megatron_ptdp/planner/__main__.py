"""`python -m megatron_ptdp.planner`: the same as `pathways-plan`."""

from megatron_ptdp.planner.cli import main

if __name__ == "__main__":
    main()
