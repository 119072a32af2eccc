"""`python -m pathways_ray.cli`: the same as `pathways`."""

from pathways_ray.cli import main

if __name__ == "__main__":
    main()
