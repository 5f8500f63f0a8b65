"""Generates the same numbers as the Rust code, so that inputs and weights need not be stored.

Values are uniform in [-1, 1) on a grid of 2^-23, which is exact in float32. See `worker/kernels/src/synthetic.rs`.
"""

import numpy as np

MASK = (1 << 64) - 1


def mix(z):
    """SplitMix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def values(name, *shape):
    """Returns a float32 array of `shape` for the name, filled in row-major order."""
    # The key is the FNV-1a hash of the name.
    key = 0xCBF29CE484222325
    for byte in name.encode():
        key = ((key ^ byte) * 0x100000001B3) & MASK
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        index = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = mix(np.uint64(key) + index) >> np.uint64(40)
    return (bits.astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(shape)


def parameter(arch, name, shape, features, fan_axis=0):
    """Returns a weight, bias or statistic of a network. The Rust tests generate the same value.

    `features`: number of inputs of the last layer. `fan_axis`: the axis of a filter that scales the filter.
    """
    drawn = values(f"{arch}.{name}", *shape)
    if len(shape) == 4:
        return drawn * np.float32(np.sqrt(6.0 / (shape[fan_axis] * shape[2] * shape[3])))
    if name.startswith("fc."):
        return drawn * np.float32(1 / np.sqrt(features))
    if name.endswith("running_var"):
        return drawn * np.float32(0.5) + np.float32(1.5)
    return drawn * np.float32(0.25) + np.float32(0.5) if name.endswith("weight") else drawn * np.float32(0.125)


def labels(name, count, classes):
    return ((values(name, count) + 1) * np.float32(classes / 2)).astype(np.int64)
