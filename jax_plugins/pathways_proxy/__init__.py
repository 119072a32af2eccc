"""JAX looks here for backends: with `JAX_PLATFORMS=proxy`, `JAX_BACKEND_TARGET` names a proxy of the runtime."""

from pathways_ray.proxy.plugin import initialize as initialize
