"""Request routing and autoscaling for Ray Serve, used by examples/ray_app.py."""

from contextlib import suppress

from ray.serve.request_router import FIFOMixin, RequestRouter

from batch_manager import kv_block_hashes
from examples.prefix_routing import BLOCK_TOKENS, ranked


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends a prompt to the replica whose cache has the longest beginning of it; see prefix_routing.py."""

    def initialize_state(self, event_hash_key: str) -> None:
        self._key = bytes.fromhex(event_hash_key)

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        body = pending_request.args[0] if pending_request is not None and pending_request.args else {}
        body = body if isinstance(body, dict) and isinstance(body.get("input_ids"), list) else {"input_ids": []}
        ids, hashes = body["input_ids"], []
        with suppress(TypeError, ValueError, OverflowError):          # the engine refuses the request
            hashes = kv_block_hashes(ids, BLOCK_TOKENS, event_hash_key=self._key,
                                     token_extra_ids=body.get("input_token_extra_ids"))
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = ranked({name: replica.routing_stats for name, replica in by_id.items()}, ids, hashes)
        return [[by_id[name]] for name in order]


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
