"""arm64 (AArch64): how its kernels are probed."""
