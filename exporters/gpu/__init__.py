"""The GPUs of this machine -> Prometheus series, ``vllm_slo_gpu_*``.

In: NVML, the library of NVIDIA's driver, or the page of a DCGM exporter. Out: readings, and the page of ``/metrics``.
``series`` is the one table of what is read and from where. Must not know: vLLM, the lake.
"""
