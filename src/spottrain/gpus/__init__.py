"""The GPUs of a machine: which there are, whether they are well, what runs on them.

Standard library only, and NVML (``nvidia-ml-py``) if it is there: this package is carried
to machines as it is. Nothing here initialises CUDA.
"""
