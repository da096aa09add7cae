"""Hopper kernels (sm_90) in Pallas Mosaic GPU: TMA loads, wgmma, warp specialisation, persistent thread blocks."""

from pallas_ce.backends.mosaic_gpu.backend import MosaicGpuBackend

BACKEND = MosaicGpuBackend()
