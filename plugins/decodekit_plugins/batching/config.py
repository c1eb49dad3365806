"""How requests share a device: plain data."""

from __future__ import annotations

from typing import Any

import attrs
from decodekit.converter import plain
from decodekit.errors import warn
from decodekit.fields import at_least, between, option


@attrs.frozen
class ContinuousBatchingConfig:
    """Arguments of continuous batching. Raises ValueError for values out of range."""

    page_size: int = option("Tokens that a page of a layer's cache holds.", default=256, check=at_least(4))
    num_blocks: int | None = option("Blocks of the cache; unset: what memory allows.", default=None, check=at_least(1))
    max_batch_tokens: int | None = option(
        "Tokens of a batch; unset: what memory allows.", default=None, check=at_least(1)
    )
    max_memory_percent: float | None = option(
        "Share of the free memory for the cache; unset: 0.9, or 0.8 with logits processors.",
        default=None,
        check=between(0, 1, low_open=True),
    )
    max_requests_per_batch: int | None = option(
        "Requests of a batch; unset: by the expected work.", default=None, check=at_least(1)
    )
    max_blocks_per_request: int | None = option(
        "Blocks of a request on the fast path for decoding; 0: no such path; unset: by the expected work.",
        default=None,
        check=at_least(0),
    )
    allow_block_sharing: bool = option("Share the blocks of equal prefixes where the model can.", default=True)
    use_async_batching: bool | None = option(
        "Prepare a batch while the one before it runs, for twice the memory; unset: where it helps.", default=None
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = option(
        "Use CUDA graphs, for all passes or as (prefill, decoding); unset: where they help.", default=None
    )
    q_padding_interval_size: int = option(
        "Queries of a CUDA graph are padded to multiples of it; 0: a preset.", default=0, check=at_least(0)
    )
    kv_padding_interval_size: int = option(
        "Keys of a CUDA graph are padded to multiples of it; 0: a preset.", default=0, check=at_least(0)
    )
    varlen_compile_config: dict[str, Any] | None = option(
        "How passes of several lengths are compiled, as compile_config; unset: as that says.", default=None
    )
    decode_compile_config: dict[str, Any] | None = option(
        "How passes of one token each are compiled, as compile_config; unset: as that says.", default=None
    )
    default_compile_level: int = option(
        "How hard to compile where neither says it: 0 not at all, 3 hardest.", default=0, check=between(0, 3)
    )
    scheduler_type: str = option("Scheduler by plugin name.", default="fifo")
    safety_margin: float | None = option(
        "Share of blocks that new requests must leave free; unset: the scheduler's own.",
        default=None,
        check=between(0, 1),
    )
    return_logprobs: bool = option("Return the log-probability of each token.", default=False)
    seed: int | None = option("Seed of the draws; unset: a random one.", default=None)
    auto_switch_to_flash: bool = option("Use flash attention where it is installed.", default=True)
    cpu_offload_space: float | None = option(
        "GiB of host memory for the caches of requests that had to make room; unset: all that is safe.",
        default=0.0,
        check=at_least(0),
    )
    cpu_offload_space_safety_threshold: float = option(
        "Share of the host's memory that this is kept to.", default=0.8, check=between(0, 1)
    )
    max_queue_size: int = option("Requests that may wait; 0: any number.", default=0, check=at_least(0))
    per_request_processors: bool = option("Let each request have its own values of processors.", default=False)
    drop_unsupported_processors: bool = option("Leave processors out that cannot run so, with a warning.", default=True)
    disable_nccl_graph_mixing: bool = option("Do without NCCL's guard for graphs of several streams.", default=True)
    cpu_group_timeout: float | None = option(
        "Seconds after which a process that does not answer is given up; unset: never.",
        default=300.0,
        check=at_least(0),
    )
    use_default_compile_configs: bool | None = option("Old name: True is default_compile_level 3.", default=None)
    max_cached_graphs: int | None = option("Without effect: graphs are not counted any more.", default=None)
    block_size: int | None = option("Old name of page_size.", default=None, check=at_least(4))

    def __attrs_post_init__(self) -> None:
        old = {"use_default_compile_configs": "default_compile_level", "block_size": "page_size"}
        for name in (*old, "max_cached_graphs"):
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, None)
            if name in old:
                value = 3 * value if isinstance(value, bool) else value
                object.__setattr__(self, old[name], value)
                warn(f"{name} is an old name: set {old[name]}={value}")
            else:
                warn(f"{name} has no effect any more: leave it out")

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON-able data."""
        return dict(plain(self))


@attrs.frozen
class ContinuousBatching:
    """Holds `continuous_batching_config`: read, checked and written back; `generate` runs one batch from end to end."""

    continuous_batching_config: ContinuousBatchingConfig | None = option(
        "How requests are batched that come and go: a ContinuousBatchingConfig or its fields.", default=None
    )
