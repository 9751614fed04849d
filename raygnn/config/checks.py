"""The names of what preflight checks, as ``cluster.allow`` takes them.

The checks themselves are in :mod:`raygnn.preflight.checks`, which this layer does not know; a test
compares the two.
"""

from __future__ import annotations

# What they find is either no error, or one that this job may live with.
ALLOWABLE = (
    "nodes_answer",
    "versions_supported",
    "versions_uniform",
    "code_uniform",
    "hardware_uniform",
    "environment_uniform",
    "cpus_are_there",
    "shared_memory",
    "host_name_resolves",
    "debug_level_safe",
    "clocks_agree",
    "open_files",
    "network_reach",
    "network_latency",
    "network_bandwidth",
    "bf16_is_there",
    "gpus_are_there",
    "gpus_are_free",
    "model_runs",
    "storage_visible",
    "partition_visible",
    "parts_agree",
    "fold_is_unseen",
    "splits_agree",
    "batch_size_fits",
    "edge_arrays_read",
    "memory_fits",
    "disk_space",
    "cache_space",
    "parts_and_workers",
)

# Of what these find the job would surely fail, or wait for ever.
BINDING = (
    "interfaces_there",
    "resources_fit",
    "devices_suit",
    "arrays_usable",
    "inputs_exist",
    "embeddings_usable",
    "nodes_to_train_on",
    "cache_usable",
    "name_free",
)
