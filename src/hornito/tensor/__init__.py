"""Graphs of generic tensor ops with static shapes: encoders, and any ONNX model of known ops."""
