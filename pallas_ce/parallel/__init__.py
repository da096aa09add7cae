"""How a streamed operation is split over devices: under `jit`, inside `shard_map`, and by `vmap`."""
