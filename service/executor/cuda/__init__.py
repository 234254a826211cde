"""Runs steps on an NVIDIA GPU: ONNX Runtime's CUDA provider around attention kernels of our own."""
