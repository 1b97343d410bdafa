"""torch's FSDP, both versions: units, shards, gathers, reductions, wrap policies, offload."""
