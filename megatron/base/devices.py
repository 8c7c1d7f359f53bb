"""What accelerators can do at best, by the name that their driver reports."""

# Dense peak in 10^12 operations a second, from the makers' data sheets: (matrix units in 16 bit, float32). The first
# entry that is part of the device's name counts, so boards with lower clocks stand before the family they belong to.
_PEAK_TERAFLOPS: tuple[tuple[str, float, float], ...] = (
    ("V100-PCIE", 112.0, 14.0),
    ("V100", 125.0, 15.7),
    ("A100", 312.0, 19.5),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("H200 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
)


def peak_flops(device_name: str, dtype_bytes: int) -> float | None:
    """Peak floating-point operations a second of one device, None where the device or the dtype is not known.

    `dtype_bytes` is the size of the numbers multiplied: 2 for float16 and bfloat16, 4 for float32 (without TF32).
    """
    for name, half, single in _PEAK_TERAFLOPS:
        if name in device_name:
            return {2: half * 1e12, 4: single * 1e12}.get(dtype_bytes)
    return None
