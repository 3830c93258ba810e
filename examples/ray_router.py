"""Where Ray Serve sends a request, and how many replicas it keeps: examples/ray_app.py uses both."""

from hashlib import blake2b

from ray.serve.request_router import FIFOMixin, RequestRouter

PREFIX_TOKENS = 64          # a KV cache block: a shorter prefix is not reused
LEAST_FREE_SHARE = 0.1      # of its blocks: below it a replica gets only what no other one can take


class PrefixRouter(FIFOMixin, RequestRouter):
    """Prompts that begin alike go to one replica, whose cache has them, unless its blocks are running out."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        body = pending_request.args[0] if pending_request is not None and pending_request.args else {}
        order = ranked({replica.replica_id.unique_id: replica.routing_stats for replica in candidate_replicas},
                       body.get("input_ids", ()) if isinstance(body, dict) else ())
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_id[name]] for name in order]


def ranked(statistics: dict[str, dict], input_ids: list[int]) -> list[str]:
    """The replicas, best first. statistics: what `record_routing_stats` of each said, or nothing yet."""
    prefix = repr(list(input_ids[:PREFIX_TOKENS])).encode()

    def worth(name: str) -> tuple[bool, bytes]:
        free_share = statistics[name].get("free_share", 1.0)
        return free_share >= LEAST_FREE_SHARE, blake2b(prefix, key=name.encode()[:64]).digest()
    return sorted(statistics, key=worth, reverse=True)


def replicas_for(running: int, least: int, most: int, waiting: float, active: float, max_active: float) -> int:
    """How many replicas a deployment needs: one more where requests wait, one fewer where the others have room.

    waiting, active   requests of all replicas;   max_active   that one replica runs at a time
    """
    if waiting > 0:
        wanted = running + 1
    elif running > 1 and active <= max_active * (running - 1) / 2:
        wanted = running - 1
    else:
        wanted = running
    return min(max(wanted, least), most)


def autoscale(context):
    """Ray Serve's autoscaling policy over what `record_autoscaling_stats` of the replicas said."""
    values = {name: list(of_replicas.values()) for name, of_replicas in (context.aggregated_metrics or {}).items()}
    waiting, active = (sum(values.get(name, [])) for name in ("waiting", "active"))
    return replicas_for(context.current_num_replicas, context.capacity_adjusted_min_replicas,
                        context.capacity_adjusted_max_replicas, waiting, active,
                        max(values.get("max_active", [1]))), {}
