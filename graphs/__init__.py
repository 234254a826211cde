"""Offline: reads a model, builds prefill.onnx and decode.onnx, verifies them."""
