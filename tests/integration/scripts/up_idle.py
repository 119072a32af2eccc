"""State of a Ray cluster: True when nothing of it is in use."""

from __future__ import annotations

import ray

ray.init(address="auto", log_to_driver=False)
groups = ray.util.placement_group_table().values()
held = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
removed = all(group["state"] == "REMOVED" for group in groups)
print(removed and not ray.util.list_named_actors(all_namespaces=True) and abs(held) < 1e-6)
