"""Request routing and autoscaling for Ray Serve, used by examples/ray_app.py."""

from hashlib import blake2b

from ray.serve.request_router import FIFOMixin, RequestRouter

PREFIX_TOKENS = 64          # one KV cache block; shorter prefixes are not reused
LEAST_FREE_SHARE = 0.1      # of the KV cache blocks; a replica with a smaller share is the last choice


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends prompts with the same prefix to the same replica, whose cache has the prefix.

    A replica with a share of free KV cache blocks below LEAST_FREE_SHARE is tried last.
    """

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        body = pending_request.args[0] if pending_request is not None and pending_request.args else {}
        order = ranked({replica.replica_id.unique_id: replica.routing_stats for replica in candidate_replicas},
                       body.get("input_ids", ()) if isinstance(body, dict) else ())
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_id[name]] for name in order]


def ranked(statistics: dict[str, dict], input_ids: list[int]) -> list[str]:
    """Return the names of the replicas for a prompt, best first.

    Replicas with enough free KV cache blocks come before the others. Within each of the two groups, the order depends
    only on the first tokens of the prompt and on the names of the replicas.

    statistics   name of a replica -> result of its `record_routing_stats`, or {} before the first result
    """
    prefix = repr(list(input_ids[:PREFIX_TOKENS])).encode()

    def score(name: str) -> tuple[bool, bytes]:
        free_share = statistics[name].get("free_share", 1.0)
        return free_share >= LEAST_FREE_SHARE, blake2b(prefix, key=name.encode()[:64]).digest()
    return sorted(statistics, key=score, reverse=True)


def replicas_for(running: int, least: int, most: int, waiting: float, active: float, max_active: float) -> int:
    """Return the wanted number of replicas, from `least` to `most`.

    One replica is added if requests wait. One is removed if the others could run all active requests at half of their
    capacity.

    running           current number of replicas
    waiting, active   number of requests on all replicas
    max_active        limit on the number of active requests of one replica
    """
    if waiting > 0:
        wanted = running + 1
    elif running > 1 and active <= max_active * (running - 1) / 2:
        wanted = running - 1
    else:
        wanted = running
    return min(max(wanted, least), most)


def autoscale(context):
    """Autoscaling policy for Ray Serve, based on the replicas' `record_autoscaling_stats`."""
    values = {name: list(of_replicas.values()) for name, of_replicas in (context.aggregated_metrics or {}).items()}
    waiting, active = (sum(values.get(name, [])) for name in ("waiting", "active"))
    return replicas_for(context.current_num_replicas, context.capacity_adjusted_min_replicas,
                        context.capacity_adjusted_max_replicas, waiting, active,
                        max(values.get("max_active", [1]))), {}
